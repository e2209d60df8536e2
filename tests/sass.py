"""Counts the instructions of loops in NVIDIA machine code, as nvdisasm -c prints it."""

import re
from collections import Counter

_LABEL = re.compile(r"^\s*(\.L\w+|\$\S+):", re.MULTILINE)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][^;]*);")
_TARGET = re.compile(r"`\((\S+?)\)")
_LEAVES = re.compile(r"EXIT|RET\b|BRA(\.U)? `")  # the instruction after it is another path's
_JUMP = re.compile(r"BRA\b.*`\((\.L\w+)\)")


def _parse(sass: str) -> tuple[list[str], dict[str, int]]:
    """(the instructions, {label: the number of the one after it})."""
    labels, instructions = {}, []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append(found[2].rstrip())
    return instructions, labels


def reached(sass: str, first: str) -> list[str]:
    """The instructions that may run from the one named ``first`` on, wherever they stand."""
    instructions, labels = _parse(sass)
    always = [not predicate for predicate, _ in _INSTRUCTION.findall(sass)]
    [start] = [n for n, x in enumerate(instructions) if x.startswith(first)]
    found, left = set(), [start]
    while left:
        if (n := left.pop()) in found:
            continue
        found.add(n)
        left += [labels[x] for x in _TARGET.findall(instructions[n]) if x in labels]
        if not (always[n] and _LEAVES.match(instructions[n])):
            left.append(n + 1)
    return [instructions[n] for n in sorted(found)]


def _innermost(instructions: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """(first, last) of each innermost loop: the code between a label and a jump back to it."""
    spans = []
    for end, instruction in enumerate(instructions):
        jump = _JUMP.match(instruction)
        if jump and labels.get(jump[1], end + 1) <= end:
            spans.append((labels[jump[1]], end))
    return [
        (a, b) for a, b in spans if not any((a, b) != s and a <= s[0] and s[1] <= b for s in spans)
    ]


def innermost_loops(sass: str) -> list[Counter]:
    """The operations of each innermost loop: the count of each, such as ``MUFU.RCP``."""
    instructions, labels = _parse(sass)
    inner = _innermost(instructions, labels)
    return [_operations(instructions[a : b + 1]) for a, b in inner]


def paired_loops(sass: str, gradients: bool = False) -> list[dict[str, int]]:
    """The additive score's loops over pairs of dims: reciprocals, no exponentials.

    Loops that add up ``gradients`` store, and are longer. Those of scores store nothing. Per
    iteration: {"slots": issue slots, "mufu": special functions, "local": spills}.
    """
    return [
        {"slots": loop.total(), "mufu": _count(loop, "MUFU"), "local": _count(loop, "LDL", "STL")}
        for loop in innermost_loops(sass)
        if loop["MUFU.RCP"] and not loop["MUFU.EX2"] and gradients == bool(_count(loop, "STG"))
    ]


def difference_loops(sass: str) -> list[dict[str, int]]:
    """The gaussian score's loops over dims, and over dims of its gradients: these store.

    Per iteration: {"slots", "fma": multiply-adds, one for each pair and dim of a score, "stores",
    "local": spills}.
    """
    return [
        {
            "slots": loop.total(), "fma": loop["FFMA"], "stores": _count(loop, "STG"),
            "local": _count(loop, "LDL", "STL"),
        }
        for loop in innermost_loops(sass)
        if loop["FFMA"] >= 8 and _count(loop, "LDG") and not _count(loop, "MUFU", "HMMA", "HGMMA")
    ]  # fmt: skip


def _operations(instructions: list[str]) -> Counter:
    return Counter(i.split()[0] for i in instructions)


def _count(loop: Counter, *names: str) -> int:
    return sum(n for operation, n in loop.items() if operation.split(".")[0] in names)


# ---- products of warpgroups ----

_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\S* R(\d+), (?:R(\d+), )?gdesc")
_REGISTER = re.compile(r"\bR(\d+)\b(\.64)?")


def product_loops(sass: str) -> list[dict[str, int]]:
    """The innermost loops with products of warpgroups.

    Per iteration: {"slots": issue slots, "mufu": special functions, "products", "columns": of the
    narrowest product, "waits", "beside": special functions between the first wait and the next,
    hence beside a product, "local": spills}, and slots and special functions without what a vote of
    the warp skips: "steady_slots" and "steady_mufu".
    """
    instructions, labels = _parse(sass)
    found = []
    for a, b in _innermost(instructions, labels):
        loop = instructions[a : b + 1]
        count = _operations(loop)
        if not _count(count, "HGMMA"):
            continue
        skipped = _skipped(loop, {x: n - a for x, n in labels.items()})
        waits = [n for n, x in enumerate(loop) if x.startswith("WARPGROUP.DEPBAR.LE")]
        beside = loop[waits[0] : waits[1]] if len(waits) > 1 else []
        found.append(
            {
                "slots": len(loop),
                "steady_slots": len(loop) - len(skipped),
                "mufu": _count(count, "MUFU"),
                "steady_mufu": _count(count, "MUFU") - _count(_operations(skipped), "MUFU"),
                "products": _count(count, "HGMMA"),
                "columns": min(int(p[1]) for p in map(_PRODUCT.match, loop) if p),
                "waits": count["WARPGROUP.DEPBAR.LE"],
                "beside": _count(_operations(beside), "MUFU"),
                "local": _count(count, "LDL", "STL"),
            }
        )
    return found


def _skipped(loop: list[str], labels: dict[str, int]) -> list[str]:
    """The instructions between the jump after each vote and where it goes."""
    skipped = []
    for n, instruction in enumerate(loop):
        if not instruction.startswith("VOTE.ANY"):
            continue
        jump = next(m for m in range(n, len(loop)) if _JUMP.match(loop[m]))
        skipped += loop[jump + 1 : labels[_JUMP.match(loop[jump])[1]]]  # pyright: ignore[reportOptionalSubscript]
    return skipped


def early_accesses(sass: str) -> list[str]:
    """Instructions that touch a product's sums, or overwrite its operand, before its wait."""
    groups: list[tuple[set[int], set[int]]] = [(set(), set())]  # sums, operands; the last is open
    found = []
    for instruction in _parse(sass)[0]:
        if product := _PRODUCT.match(instruction):
            size, sums, operand = (int(x) if x else None for x in product.groups())
            groups[-1][0].update(range(sums, sums + size // 2))  # pyright: ignore
            if operand is not None:
                groups[-1][1].update(range(operand, operand + 4))
            if "gsb0" in instruction:
                groups.append((set(), set()))
        elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", instruction):
            groups = groups[len(groups) - 1 - min(len(groups) - 1, int(wait[1])) :]
        elif _touches(instruction, groups):
            found.append(instruction)
    return found


def late_writes(sass: str) -> list[str]:
    """Instructions that write a product's sums or operand after the fence of its group."""
    after: list[str] = []
    found = []
    for instruction in _parse(sass)[0]:
        if instruction.startswith("WARPGROUP.ARRIVE"):
            after = []
        elif product := _PRODUCT.match(instruction):
            size, sums, operand = (int(x) if x else None for x in product.groups())
            used = {*range(sums, sums + size // 2)}  # pyright: ignore
            used |= set() if operand is None else {*range(operand, operand + 4)}
            found += [x for x in after if _touches(x, [(set(), used)])]
        else:
            after.append(instruction)
    return found


def _touches(instruction: str, groups: list[tuple[set[int], set[int]]]) -> bool:
    operation, _, operands = instruction.partition(" ")
    own = 4 if ".128" in operation else 2 if ".64" in operation else 1
    # An address says itself that it is a pair.
    used = [
        {int(n) + x for x in range(2 if wide else own)} for n, wide in _REGISTER.findall(operands)
    ]
    every, written = set().union(*used), used[0] if used else set()
    return any(every & sums or written & held for sums, held in groups)
