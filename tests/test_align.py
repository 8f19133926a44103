"""One clock for several ranks."""

from __future__ import annotations

import numpy as np
import pytest

from gpudiag.align import align
from gpudiag.pipeline import diagnose

MS = 1_000_000
ENDS = np.arange(1, 11, dtype=np.int64) * 10 * MS


def test_wall_clock_bases_align_ranks_where_the_collectives_agree() -> None:
    got = align({0: 5_000 * MS, 1: 5_003 * MS}, {0: ENDS, 1: ENDS - 3 * MS})
    assert (got.source, got.offset_ns) == ("baseTimeNanoseconds", {0: 0, 1: 3 * MS})


def test_collectives_are_believed_where_the_clocks_differ() -> None:
    got = align({0: 5_000 * MS, 1: 5_000 * MS}, {0: ENDS, 1: ENDS + 40 * MS})
    assert (got.source, got.offset_ns, got.disagree_ns) == ("collectives", {0: 0, 1: -40 * MS}, 40 * MS)


def test_without_bases_the_collectives_align() -> None:
    late = ENDS + 7 * MS
    late[0] += 300 * MS  # one odd collective does not move the median
    assert align({0: None, 1: None}, {0: ENDS, 1: late}).offset_ns == {0: 0, 1: -7 * MS}


@pytest.mark.parametrize("ends", [{}, {0: ENDS[:3], 1: ENDS[:3]}])
def test_with_neither_nothing_is_claimed(ends: dict[int, np.ndarray]) -> None:
    assert align({0: None, 1: 7}, ends).source == "none"


def test_real_ranks_of_one_node_need_no_large_correction(traces) -> None:
    rows = diagnose([traces / "kineto" / "megatron_tp8"]).ranks
    assert {row["aligned_by"] for row in rows} <= {"collectives", "baseTimeNanoseconds"}
    assert max(abs(row["clock_offset_ns"]) for row in rows) < 1 * MS, "the 8 GPUs share one clock"
