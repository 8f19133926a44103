"""NVTX ranges in domain "gpudiag" from inside the user's process, with the standard library alone.

Why not the `nvtx` package: measured with nsys 2022.4.2 and five package versions (0.2.10 to 0.2.17), push/pop rows
arrive up to 0.2.11 and are silently lost from 0.2.12 on. From then on the package asks `nvtxDomainIsEnabled` (part of
NVTX's payload *extension*) right after creating a domain, and an injection library that does not fill that slot makes
it answer 0, whereupon `nvtx.get_domain` hands out a `DummyDomain` whose methods do nothing. The domain itself had been
created by then, so its row is in the report and the loss looks like an empty domain. `nvtx` is also not installed in
most users' interpreters.

So this file is an NVTX client of its own: the tool names its injection library in NVTX_INJECTION64_PATH; the client
loads it and calls `InitializeInjectionNvtx2(getter)`, the library asks the getter for the function tables of each
module and writes its functions into them (NVTX v3 ABI, `nvtxDetail/nvtxTypes.h`; unchanged since NVTX 3.0, and shared
with NCCL's and torch's clients in the same process, each of which attaches on its own). Event strings are registered,
which is what `nsys --capture-range=nvtx --nvtx-capture=` matches by default.

Without a tool (no NVTX_INJECTION64_PATH) every call is a no-op. Threads may push and pop freely: nesting is kept by
the tool per thread and domain. A forked child that does not exec goes silent: nsys does not record it by default
(`--trace-fork-before-exec=false`), and the tool's locks may have been held by another thread at the moment of the fork.

Measured on the 2-core development machine: 1.2 us for a push with payload and its pop under nsys, 0.15 us without a
tool. Every row arrives with nsys 2022.4.2 and 2023.4.4 (tests/test_nvtx_emit.py), and the file runs on Python 3.7 to 3.13.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

DOMAIN = "gpudiag"

# Slots of the function tables of the NVTX v3 modules, by module id: core, cuda, opencl, cudart, core2, sync.
_MODULE_SLOTS = {1: 16, 2: 9, 3: 15, 4: 7, 5: 16, 6: 7}
_CORE2 = 5
_RANGE_PUSH_EX, _RANGE_POP, _REGISTER_STRING, _DOMAIN_CREATE = 4, 5, 10, 12  # slots of core2
_ETID_CALLBACKS, _ETID_VERSION_INFO = 1, 3
_NVTX_VERSION = 3
_PAYLOAD_INT64 = 2
_MESSAGE_REGISTERED = 3


class _EventAttributes(ctypes.Structure):
    """nvtxEventAttributes_v2, 48 bytes on a 64-bit machine."""

    _fields_ = (
        ("version", ctypes.c_uint16),
        ("size", ctypes.c_uint16),
        ("category", ctypes.c_uint32),
        ("color_type", ctypes.c_int32),
        ("color", ctypes.c_uint32),
        ("payload_type", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("payload", ctypes.c_int64),
        ("message_type", ctypes.c_int32),
        ("message", ctypes.c_void_p),
    )


_GetModuleFunctionTable = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint)
)
_SetInjectionVersion = ctypes.CFUNCTYPE(None, ctypes.c_uint32)
_GetExportTable = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)


class _CallbacksTable(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("get_module_function_table", _GetModuleFunctionTable))


class _VersionTable(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("set_injection_version", _SetInjectionVersion),
    )


class _Client:
    """One attachment to an injection library. Everything the library may keep a pointer to lives as long as this does.

    Raises OSError when the library cannot be loaded, AttributeError when it has no entry point, and RuntimeError when
    it refuses or does not offer domains.
    """

    def __init__(self, library: str) -> None:
        self._functions = {module: (ctypes.c_void_p * slots)() for module, slots in _MODULE_SLOTS.items()}
        self._tables = {}
        for module, slots in self._functions.items():
            # slot 0 is invalid by definition and a null ends the table, as in NVTX's own client
            table = (ctypes.c_void_p * (len(slots) + 1))()
            for slot in range(1, len(slots)):
                table[slot] = ctypes.addressof(slots) + slot * ctypes.sizeof(ctypes.c_void_p)
            self._tables[module] = table
        self._callbacks = _CallbacksTable(ctypes.sizeof(_CallbacksTable), _GetModuleFunctionTable(self._module_table))
        self._version = _VersionTable(
            ctypes.sizeof(_VersionTable), _NVTX_VERSION, 0, _SetInjectionVersion(lambda version: None)
        )
        self._getter = _GetExportTable(self._export_table)
        initialize = ctypes.CDLL(library, mode=os.RTLD_LAZY).InitializeInjectionNvtx2
        initialize.argtypes, initialize.restype = (_GetExportTable,), ctypes.c_int
        if not initialize(self._getter):
            raise RuntimeError("the injection library refused to attach")
        # PYFUNCTYPE keeps the interpreter lock: the calls take well under a microsecond, less than handing it over.
        create = self._function(_DOMAIN_CREATE, ctypes.c_void_p, ctypes.c_char_p)
        self._register = self._function(_REGISTER_STRING, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
        self._push = self._function(_RANGE_PUSH_EX, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_EventAttributes))
        self._pop = self._function(_RANGE_POP, ctypes.c_int, ctypes.c_void_p)
        self._domain = ctypes.c_void_p(create(DOMAIN.encode()))
        self._names: dict[str, _EventAttributes] = {}
        self._lock = threading.Lock()

    def _function(self, slot: int, result: type, *arguments: type) -> Callable[..., int]:
        address = self._functions[_CORE2][slot]
        if not address:
            raise RuntimeError(f"the injection library leaves NVTX core2 function {slot} empty")
        return ctypes.PYFUNCTYPE(result, *arguments)(address)

    def _module_table(self, module: int, out_table: ctypes._Pointer, out_size: ctypes._Pointer) -> int:
        table = self._tables.get(module)
        if table is None:
            return 0
        if out_size:
            out_size[0] = len(table) - 1
        if out_table:
            out_table[0] = ctypes.addressof(table)
        return 1

    def _export_table(self, which: int) -> int | None:
        if which == _ETID_CALLBACKS:
            return ctypes.addressof(self._callbacks)
        if which == _ETID_VERSION_INFO:
            return ctypes.addressof(self._version)
        return None

    def push(self, name: str, payload: int | None) -> None:
        attributes = self._names.get(name) or self._attributes(name)
        if payload is not None:
            # a copy, since another thread may push the same name between setting the payload and the call
            attributes = _EventAttributes.from_buffer_copy(attributes)
            attributes.payload_type, attributes.payload = _PAYLOAD_INT64, payload
        self._push(self._domain, attributes)

    def pop(self) -> None:
        self._pop(self._domain)

    def _attributes(self, name: str) -> _EventAttributes:
        with self._lock:
            if name not in self._names:
                self._names[name] = _EventAttributes(
                    version=_NVTX_VERSION,
                    size=ctypes.sizeof(_EventAttributes),
                    message_type=_MESSAGE_REGISTERED,
                    message=self._register(self._domain, name.encode("utf-8", "replace")),
                )
            return self._names[name]


_client: _Client | None = None
_attached = False  # whether attaching was tried, successfully or not
_problem = ""
_attach_lock = threading.Lock()


def available() -> bool:
    """Whether ranges reach a tool. Attaches on the first call (some milliseconds with nsys), then answers at once."""
    _attach()
    return _client is not None


def problem() -> str:
    """Why ranges do not reach the tool that asked for them; "" when they do, or when no tool asked."""
    _attach()
    return _problem


def push(name: str, payload: int | None = None) -> None:
    """Open a range on this thread in domain "gpudiag". payload: a signed 64-bit number (the step index)."""
    if not _attached:
        _attach()
    client = _client
    if client is not None:
        client.push(name, payload)


def pop() -> None:
    """Close this thread's innermost range of domain "gpudiag"."""
    client = _client
    if client is not None:
        client.pop()


def _attach() -> None:
    global _client, _attached, _problem
    if _attached:
        return
    with _attach_lock:
        if _attached:
            return
        library = os.environ.get("NVTX_INJECTION64_PATH")
        if library:
            try:
                _client = _Client(library)
            except (OSError, AttributeError, RuntimeError, MemoryError) as error:
                _problem = (
                    f"NVTX ranges cannot reach {library}: {error}"  # MemoryError: no memory may be made executable
                )
        _attached = True


def _forget_in_child() -> None:
    global _client, _attached, _attach_lock
    _client, _attached, _attach_lock = None, True, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
