"""The JSON Schema of the diagnosis, made from the types that write and read it: it cannot fall out of step with them.

A field with a default may be left out, and a reader must ignore fields it does not know, so additions keep the version
(`gpudiag.diagnosis/1`); a change of meaning raises it.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gpudiag.diagnosis import SCHEMA, Diagnosis


def diagnosis_schema() -> dict[str, Any]:
    """Draft 2020-12."""
    schema = msgspec.json.schema(Diagnosis)
    diagnosis = schema["$defs"]["Diagnosis"]
    diagnosis["properties"]["schema"] = {"const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{SCHEMA}: what `gpudiag analyze --json` prints",
        **schema,
    }


def render() -> str:
    return json.dumps(diagnosis_schema(), indent=2) + "\n"
