"""Compiles attention's two products with Triton for sm_90, and prints what PTX it makes of them.

    python tests/cuda/triton_products.py KEYS_OF_A_TILE

A JSON list, a product each: the constants that Triton adds to the address fields of its descriptors
(of A unless A is in registers, and of B), and the numbers after the operands: signs, then layouts.
It does not work where Triton interprets: run it in its own process.
"""

import json
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROWS, DIMS = tl.constexpr(64), tl.constexpr(128)


@triton.jit
def products(q, k, v, out, N, KEYS: tl.constexpr):
    i, j, d = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, DIMS)
    queries = tl.load(q + i[:, None] * DIMS + d[None, :])
    sums = tl.zeros([ROWS, DIMS], tl.float32)
    for n in range(0, N, KEYS):
        where = (n + j)[:, None] * DIMS + d[None, :]
        scores = tl.dot(queries, tl.trans(tl.load(k + where)))
        sums = tl.dot(scores.to(tl.bfloat16), tl.load(v + where), sums)
    tl.store(out + i[:, None] * DIMS + d[None, :], sums)


def compiled(keys: int) -> str:
    types = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*fp32", "N": "i32"}
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(types))}
    types["KEYS"] = "constexpr"
    source = ASTSource(products, types, {"KEYS": keys}, aligned)
    options = {"num_warps": 4, "num_stages": 2}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def main() -> None:
    ptx = compiled(int(sys.argv[1]))
    constants = dict(re.findall(r"(?:or\.b64|add\.s64)\s+(%rd\d+), %rd\d+, (\d+);", ptx))
    found = []
    for operands in re.findall(r"wgmma\.mma_async\S+ \{.*?\}, (.*);", ptx):
        names = re.findall(r"%rd\d+", operands)
        layouts = re.search(r"((?:, -?[01])+)$", operands)
        found.append(
            {
                "descriptors": [int(constants[name]) for name in names],
                "numbers": [int(x) for x in layouts[1].split(",")[1:]] if layouts else [],
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
