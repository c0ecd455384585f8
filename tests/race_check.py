"""Finds races of Triton kernels without a GPU: Triton's interpreter, with a record of what is read and written where.

The interpreter runs the programs of a launch one after the other, each in a single thread, and so hides what goes wrong
if programs and threads run at the same time. Within `checked()` every launch is searched for:

- PROGRAMS: an address that two programs touch, one of them with a store. Atomics among themselves are allowed.
- BARRIER: in one program, an address that is stored and touched again, by a load, a store or an atomic, or loaded and
  then stored, without `tl.debug_barrier()` between: another thread may do the second. Allowed are a load and then a
  store by the same lanes of tiles of the same shape, since such tiles have the same layout.
- LANES: two lanes of one store with the same address and different values.
- UNWRITTEN: a load of memory that neither a kernel nor PyTorch has written since `torch.empty`.
- OUTSIDE: an address that is no element of the tensor whose pointer it was computed from.

Lanes that are masked off do not count. What a program orders by atomics (a lock) is not understood: its other accesses
are findings. Types of one byte are not searched for UNWRITTEN.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

PROGRAMS, BARRIER, LANES, UNWRITTEN, OUTSIDE = "programs", "barrier", "lanes", "unwritten", "outside"
LOAD, STORE, ATOMIC = "load", "store", "atomic"
# What must not meet in one address.
CONFLICTS = {LOAD: (STORE, ATOMIC), STORE: (LOAD, STORE, ATOMIC), ATOMIC: (LOAD, STORE)}
# What memory has that nothing was written to, in every two bytes: NaN in float16, bfloat16 and float32, and in integers
# a number that nothing computes. Whatever writes, a kernel or PyTorch, replaces it.
POISON = 0x7FA5
# A kernel gets addresses that are this far apart, so they tell which argument they were computed from.
SPACING = 1 << 44


@dataclasses.dataclass(frozen=True)
class Finding:
    """A defect, with the first element and the first programs that show it.

    Attributes:
        kind: PROGRAMS, BARRIER, LANES, UNWRITTEN or OUTSIDE.
        what: the accesses.
        kernel: its name.
        argument: the name of the tensor, `window.start` for one in a named tuple.
        element: its number, from the first of the tensor.
        programs: their ids, in the three axes of the grid.
        line: of the kernel, and of its callers up to the kernel; "" if the program has ended.
    """

    kind: str
    what: str
    kernel: str
    argument: str
    element: int
    programs: tuple[tuple[int, ...], ...]
    line: str

    def __str__(self) -> str:
        programs = " and ".join(map(str, self.programs))
        at = f" ({self.line})" if self.line else ""
        return f"{self.kernel}: {self.kind}: {self.what}: {self.argument}[{self.element}], program {programs}{at}"


@dataclasses.dataclass
class Report:
    """What `checked()` yields.

    Attributes:
        findings: one for each kind, argument and line of a launch.
        programs: how many programs of each kernel were searched, by name.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    programs: dict[str, int] = dataclasses.field(default_factory=dict)
    launch: Any = None

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


class Memory:
    """The storage of one or more arguments, in positions of `unit` bytes, during a launch."""

    def __init__(self, storage: torch.UntypedStorage, unit: int) -> None:
        self.address, self.unit, self.size = storage.data_ptr(), unit, storage.nbytes() // unit
        # By kind of access: where the running program made it, and where it did since the last barrier.
        self.now: dict[str, np.ndarray] = {}
        self.fresh: dict[str, np.ndarray] = {}
        # By kind of access: an earlier program that made it, or -1.
        self.earlier: dict[str, np.ndarray] = {}
        # Positions, lanes and shapes of the loads since the last barrier.
        self.loads: list[tuple[np.ndarray, np.ndarray, tuple[int, ...]]] = []
        # The lane of a store that writes a position, or -1.
        self.lane = np.full(self.size, -1)

    def mark(self, kind: str, positions: np.ndarray) -> None:
        for marks in (self.now, self.fresh):
            if kind not in marks:
                marks[kind] = np.zeros(self.size, bool)
            marks[kind][positions] = True

    def touched(self, kind: str, positions: np.ndarray) -> np.ndarray:
        """Those of the positions that the program has touched since the last barrier."""
        return positions[self.fresh[kind][positions]] if kind in self.fresh else positions[:0]

    def barrier(self) -> None:
        self.fresh.clear()
        self.loads.clear()

    def end_program(self, program: int) -> Iterator[tuple[str, str, int, int]]:
        """Yields conflicts with earlier programs: both kinds of access, the first position, the other program."""
        for mine, marks in self.now.items():
            for theirs in CONFLICTS[mine]:
                if theirs in self.earlier:
                    where = np.flatnonzero(marks & (self.earlier[theirs] >= 0))
                    if where.size:
                        yield mine, theirs, where[0], self.earlier[theirs][where[0]]
        for kind, marks in self.now.items():
            if kind not in self.earlier:
                self.earlier[kind] = np.full(self.size, -1)
            self.earlier[kind][marks] = program
        self.now.clear()
        self.barrier()


class Argument:
    """A tensor that a kernel was given: its memory, the address that the kernel gets, and which positions it has."""

    def __init__(self, name: str, tensor: torch.Tensor, memory: Memory, number: int) -> None:
        self.name, self.memory = name, memory
        self.start = tensor.data_ptr() - memory.address
        # In the middle of its space, for addresses before the tensor; aligned as the tensor is.
        self.base = number * SPACING + SPACING // 2 + tensor.data_ptr() % 64
        self.parts = tensor.element_size() // memory.unit
        self.inside = np.zeros(memory.size, bool)
        # Positions from which an element begins.
        elements = np.lib.stride_tricks.as_strided(
            self.inside[self.start // memory.unit :],
            tensor.shape,
            [stride * self.parts for stride in tensor.stride()],
        )
        if tensor.numel():
            elements[...] = True
            for _ in range(1, self.parts):
                self.inside[1:] |= self.inside[:-1]

    def element(self, position: int) -> int:
        return (int(position) * self.memory.unit - self.start) // (self.memory.unit * self.parts)


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an argument of a kernel, with names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple):
        fields = getattr(value, "_fields", range(len(value)))
        for field, part in zip(fields, value):
            yield from named_tensors(f"{name}.{field}", part)


def same(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the interpreter's copy of an argument has in common with it."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class Launch:
    """A launch of a kernel."""

    def __init__(self, kernel: str, arguments: dict[str, Any], findings: list[Finding]) -> None:
        self.kernel, self.findings = kernel, findings
        self.known: set[tuple[Any, ...]] = set()
        self.programs: list[tuple[int, ...]] = []
        named = [pair for name, value in arguments.items() for pair in named_tensors(name, value)]
        self.names: dict[tuple[Any, ...], list[str]] = {}
        units: dict[int, int] = {}
        storages = {}
        for name, tensor in named:
            self.names.setdefault(same(tensor), []).append(name)
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
            unit = units.get(storage.data_ptr(), tensor.element_size())
            units[storage.data_ptr()] = min(unit, tensor.element_size())
        self.memories = {address: Memory(storage, units[address]) for address, storage in storages.items()}
        self.arguments: list[Argument] = []

    def place(self, tensor: torch.Tensor) -> int:
        """The address that the kernel gets for a tensor."""
        memory = self.memories[tensor.untyped_storage().data_ptr()]
        name = " = ".join(self.names[same(tensor)])
        self.arguments.append(Argument(name, tensor, memory, len(self.arguments) + 1))
        return self.arguments[-1].base

    def found(self, kind: str, what: str, argument: str, element: int, *others: int, line: str) -> None:
        if (kind, what, argument, line) not in self.known:
            self.known.add((kind, what, argument, line))
            programs = (*(self.programs[other] for other in others), self.programs[-1])
            self.findings.append(Finding(kind, what, self.kernel, argument, element, programs, line))

    def begin_program(self, place: tuple[int, ...]) -> None:
        self.end_program()
        self.programs.append(place)

    def end_program(self) -> None:
        for memory in self.memories.values():
            for mine, theirs, position, other in memory.end_program(len(self.programs) - 1):
                owners = [argument for argument in self.arguments if argument.memory is memory]
                name = " or ".join(dict.fromkeys(argument.name for argument in owners))
                what = f"{theirs}, {mine} by another program"
                self.found(PROGRAMS, what, name, owners[0].element(position), other, line="")

    def barrier(self) -> None:
        for memory in self.memories.values():
            memory.barrier()

    def access(
        self, kind: str, pointers: Any, mask: np.ndarray, values: np.ndarray | None = None
    ) -> tuple[Any, np.ndarray]:
        """Records an access; returns the true addresses, and the mask without the lanes that have none.

        values: what is stored.
        """
        shape = pointers.data.shape
        width = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
        mask = np.broadcast_to(mask, shape).astype(bool)
        lanes = np.flatnonzero(mask)
        addresses = pointers.data.reshape(-1)[lanes]
        true, usable = np.zeros(mask.size, np.uint64), np.zeros(mask.size, bool)
        owners = (addresses // np.uint64(SPACING)).astype(np.int64) - 1
        of_one = owners.size > 0 and (owners == owners[0]).all()
        for owner in owners[:1] if of_one else np.unique(owners):
            mine = slice(None) if of_one else owners == owner
            of_owner = lanes[mine]
            if not 0 <= owner < len(self.arguments):
                self.found(OUTSIDE, kind, "no tensor", int(addresses[mine][0]), line=self.line())
                continue
            argument = self.arguments[owner]
            memory = argument.memory
            offsets = argument.start + (addresses[mine] - np.uint64(argument.base)).astype(np.int64)
            parts = np.arange(max(1, width // memory.unit))
            positions = offsets[:, None] // memory.unit + parts
            nearest = positions.clip(0, memory.size - 1)
            good = np.zeros(len(of_owner), bool)
            if memory.size:
                good = ((nearest == positions) & argument.inside[nearest]).all(1)
            if not good.all():
                element = argument.element(positions[~good][0, 0])
                self.found(OUTSIDE, kind, argument.name, element, line=self.line())
                of_owner, offsets, positions = of_owner[good], offsets[good], positions[good]
            true[of_owner] = memory.address + offsets.astype(np.uint64)
            usable[of_owner] = True
            stored = None if values is None else np.broadcast_to(values, shape).reshape(-1)
            self.order(kind, argument, positions, of_owner, shape, stored)
        return interpreter.TensorHandle(true.reshape(shape), pointers.dtype), usable.reshape(shape)

    def order(
        self,
        kind: str,
        argument: Argument,
        positions: np.ndarray,
        lanes: np.ndarray,
        shape: tuple[int, ...],
        values: np.ndarray | None,
    ) -> None:
        """Compares an access of a program with those that it made since the last barrier, and records it."""
        memory = argument.memory
        for before in {LOAD: (STORE, ATOMIC), STORE: (STORE, ATOMIC), ATOMIC: (STORE,)}[kind]:
            touched = memory.touched(before, positions)
            if touched.size:
                what = f"{before}, {kind} without a barrier"
                self.found(BARRIER, what, argument.name, argument.element(touched[0]), line=self.line())
        if kind == LOAD:
            memory.loads.append((positions, lanes, shape))
        else:
            memory.lane[positions] = lanes[:, None]
            winner = memory.lane[positions]
            if values is not None:
                # NaN equals itself here.
                bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
                differ = positions[bits[winner] != bits[lanes][:, None]]
                if differ.size:
                    self.found(LANES, kind, argument.name, argument.element(differ[0]), line=self.line())
            for loaded, of_load, load_shape in memory.loads:
                writer = memory.lane[loaded]
                other = (writer >= 0) & ((writer != of_load[:, None]) | (load_shape != shape))
                if other.any():
                    what = f"load, {kind} by another lane without a barrier"
                    element = argument.element(loaded[other][0])
                    self.found(BARRIER, what, argument.name, element, line=self.line())
            memory.lane[positions] = -1
        memory.mark(kind, positions)

    def read(self, pointers: Any, mask: np.ndarray, data: np.ndarray) -> None:
        """Searches what was loaded for memory that nothing was written to."""
        width = data.itemsize
        if width < 2 or not mask.any():
            return
        bits = np.ascontiguousarray(data).view(f"u{width}")
        unwritten = mask & (bits == int(f"{POISON:04x}" * (width // 2), 16))
        if unwritten.any():
            address = int(pointers.data[unwritten][0])
            argument = self.arguments[address // SPACING - 1]
            element = (address - argument.base) // (argument.memory.unit * argument.parts)
            self.found(UNWRITTEN, LOAD, argument.name, element, line=self.line())

    def line(self) -> str:
        """Where the kernel is: its own line last."""
        frame, lines = sys._getframe(1), []
        ours = (__file__, os.path.dirname(interpreter.__file__), os.path.dirname(inspect.getfile(interpreter.tl)))
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(ours):
                lines.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
                if code.co_name == self.kernel:
                    break
            frame = frame.f_back
        return ", ".join(lines)


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An allocation whose memory has POISON."""

    @functools.wraps(allocate)
    def allocated(*arguments: Any, **settings: Any) -> torch.Tensor:
        tensor = allocate(*arguments, **settings)
        # Fake tensors and those on the meta device have no memory.
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.numel():
            torch.tensor([], dtype=torch.int16).set_(tensor.untyped_storage()).fill_(POISON)
        return tensor

    return allocated


@contextlib.contextmanager
def checked() -> Iterator[Report]:
    """Within it, launches of kernels are searched for the defects named at the top of this file."""
    report = Report()
    builder = interpreter.InterpreterBuilder
    call, convert = interpreter.GridExecutor.__call__, interpreter._implicit_cvt
    enter, barrier = builder.set_grid_idx, builder.create_barrier
    load, store = builder.create_masked_load, builder.create_masked_store
    update, swap = builder.create_atomic_rmw, builder.create_atomic_cas
    handle = interpreter.TensorHandle

    def checked_call(self: Any, *arguments: Any, **settings: Any) -> None:
        named = {**dict(zip(self.arg_names, arguments)), **settings}
        name = self.fn.__name__
        report.launch = Launch(name, named, report.findings)
        try:
            call(self, *arguments, **settings)
            report.launch.end_program()
            report.programs[name] = report.programs.get(name, 0) + len(report.launch.programs)
        finally:
            report.launch = None

    def checked_convert(argument: Any) -> Any:
        converted = convert(argument)
        if report.launch is not None and isinstance(argument, torch.Tensor):
            converted.handle.data[:] = report.launch.place(argument)
        return converted

    def checked_enter(self: Any, x: int, y: int, z: int) -> None:
        report.launch.begin_program((x, y, z))
        enter(self, x, y, z)

    def checked_barrier(self: Any) -> None:
        report.launch.barrier()
        barrier(self)

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **settings: Any) -> Any:
        true, usable = report.launch.access(LOAD, pointers, mask.data)
        result = load(self, true, handle(usable, mask.dtype), *rest, **settings)
        report.launch.read(pointers, usable, result.data)
        return result

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **settings: Any) -> Any:
        true, usable = report.launch.access(STORE, pointers, mask.data, value.data)
        return store(self, true, value, handle(usable, mask.dtype), *rest, **settings)

    def checked_update(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        true, usable = report.launch.access(ATOMIC, pointers, mask.data)
        result = update(self, operation, true, value, handle(usable, mask.dtype), *rest)
        report.launch.read(pointers, usable, result.data)
        return result

    def checked_swap(self: Any, pointers: Any, expected: Any, value: Any, *rest: Any) -> Any:
        true, usable = report.launch.access(ATOMIC, pointers, np.ones_like(pointers.data, dtype=bool))
        if not usable.all():
            raise IndexError("tl.atomic_cas outside of a tensor")
        result = swap(self, true, expected, value, *rest)
        report.launch.read(pointers, usable, result.data)
        return result

    patches = [
        (interpreter.GridExecutor, "__call__", checked_call),
        (interpreter, "_implicit_cvt", checked_convert),
        (builder, "set_grid_idx", checked_enter),
        (builder, "create_barrier", checked_barrier),
        (builder, "create_masked_load", checked_load),
        (builder, "create_masked_store", checked_store),
        (builder, "create_atomic_rmw", checked_update),
        (builder, "create_atomic_cas", checked_swap),
        *((torch, name, poisoned(getattr(torch, name))) for name in ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield report
