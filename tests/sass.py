"""Counts the instructions of loops in NVIDIA machine code, as nvdisasm -c prints it."""

import re
from collections import Counter

_LABEL = re.compile(r"^\s*(\.L\w+):", re.MULTILINE)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);")
_JUMP = re.compile(r"BRA\b.*`\((\.L\w+)\)")


def innermost_loops(sass: str) -> list[Counter]:
    """The operations of each innermost loop: the count of each, such as ``MUFU.RCP``.

    A loop is the code between a label and a jump back to it.
    """
    labels, instructions = {}, []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append(found[1])
    spans = []
    for end, instruction in enumerate(instructions):
        jump = _JUMP.match(instruction)
        if jump and labels.get(jump[1], end + 1) <= end:
            spans.append((labels[jump[1]], end))
    inner = [
        (a, b) for a, b in spans if not any((a, b) != s and a <= s[0] and s[1] <= b for s in spans)
    ]
    return [Counter(i.split()[0] for i in instructions[a : b + 1]) for a, b in inner]


def paired_loops(sass: str) -> list[dict[str, int]]:
    """The additive score's loops over pairs of dims: reciprocals, no exponentials, no stores.

    Per iteration: {"slots": issue slots, "mufu": special functions, "local": spills}.
    """
    return [
        {"slots": loop.total(), "mufu": _count(loop, "MUFU"), "local": _count(loop, "LDL", "STL")}
        for loop in innermost_loops(sass)
        if loop["MUFU.RCP"] and not loop["MUFU.EX2"] and not _count(loop, "STG")
    ]


def gradient_loops(sass: str) -> list[dict[str, int]]:
    """Like paired_loops, for loops that add up gradients: these store, and are longer."""
    return [
        {"slots": loop.total(), "mufu": _count(loop, "MUFU"), "local": _count(loop, "LDL", "STL")}
        for loop in innermost_loops(sass)
        if loop["MUFU.RCP"] and not loop["MUFU.EX2"] and _count(loop, "STG")
    ]


def _count(loop: Counter, *names: str) -> int:
    return sum(n for operation, n in loop.items() if operation.split(".")[0] in names)
