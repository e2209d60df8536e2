"""Counting instructions, on an artificial listing."""

import pytest
import sass

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   MUFU.EX2 R2, R3 ;
.L_x_1:
        /*0020*/                   LDG.E R4, desc[UR4][R2.64+0x10] ;
        /*0030*/                   FFMA R5, R4, R4, 1 ;
        /*0040*/               @P0 LDL R9, [R1+0x4] ;
        /*0050*/                   MUFU.RCP R6, R5 ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/              @!P0 BRA `(.L_x_2) ;
        /*0080*/                   BRA `(.L_x_0) ;
.L_x_2:
        /*0090*/                   MUFU.RCP R6, R5 ;
        /*00a0*/                   STG.E desc[UR4][R2.64], R6 ;
        /*00b0*/              @!P2 BRA `(.L_x_2) ;
        /*00c0*/                   EXIT ;
"""


def test_loops_with_another_inside_are_not_counted():
    inner, storing = sass.innermost_loops(LISTING)
    assert inner == {"LDG.E": 1, "FFMA": 1, "LDL": 1, "MUFU.RCP": 1, "BRA": 1}
    assert storing == {"MUFU.RCP": 1, "STG.E": 1, "BRA": 1}


def test_paired_loops_have_reciprocals_and_no_stores():
    assert sass.paired_loops(LISTING) == [{"slots": 5, "mufu": 1, "local": 1}]
    assert sass.paired_loops(LISTING, gradients=True) == [{"slots": 3, "mufu": 1, "local": 0}]


ROLES = """
        /*0000*/               @P0 BRA `(.L_x_0) ;
        /*0010*/                   USETMAXREG.DEALLOC.CTAPOOL 0x20 ;
        /*0020*/                   BRA.DIV UR4, `(.L_x_2) ;
.L_x_1:
        /*0030*/               @P1 EXIT ;
        /*0040*/                   IADD3 R8, R8, 0x1, RZ ;
        /*0050*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0060*/                   FADD R90, R90, R91 ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   WARPSYNC.COLLECTIVE R29, `(.L_x_3) ;
        /*0090*/                   MOV R28, R2 ;
        /*00a0*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*00b0*/                   CALL.REL.NOINC `($__internal_0) ;
        /*00c0*/                   RET.REL.NODEC R4 `(kernel) ;
        /*00d0*/                   FADD R92, R92, R93 ;
$__internal_0:
        /*00e0*/                   MUFU.RCP R6, R5 ;
        /*00f0*/                   RET.REL.NODEC R4 `(kernel) ;
"""


def test_what_runs_behind_an_instruction_stands_anywhere():
    code = sass.reached(ROLES, "USETMAXREG.DEALLOC")
    operations = [x.split()[0].partition(".")[0] for x in code]
    assert operations == [
        "USETMAXREG", "BRA", "EXIT", "IADD3", "BRA", "WARPSYNC", "MOV", "BRA", "CALL", "RET",
        "MUFU", "RET",
    ]  # fmt: skip


PRODUCTS = """
.L_x_7:
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], RZ, !UPT ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], R24, gsb0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R88, R180, gdesc[UR16].tnspB, R88, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   MUFU.EX2 R30, R31 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   VOTE.ANY P0, P0 ;
        /*0080*/              @!P0 BRA `(.L_x_8) ;
        /*0090*/                   FMUL R88, R88, R2 ;
        /*00a0*/                   MUFU.EX2 R89, R2 ;
.L_x_8:
        /*00b0*/                   F2FP.BF16.F32.PACK_AB R180, R30, R31 ;
        /*00c0*/               @P1 BRA `(.L_x_7) ;
"""


def test_loops_of_products():
    [loop] = sass.product_loops(PRODUCTS)
    assert (loop["slots"], loop["mufu"]) == (13, 2)
    assert (loop["steady_slots"], loop["steady_mufu"]) == (11, 1)  # without what the vote skips
    assert (loop["products"], loop["waits"], loop["local"]) == (3, 2, 0)


@pytest.mark.parametrize(
    ("before", "early"),
    [
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "FADD R1, R24, R2"),  # sums of the first group
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "FMUL R119, R1, R2"),  # of the second
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R183, R2"),  # its operand is overwritten
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "STG.E.128 [R2.64], R86"),  # four registers
    ],
)
def test_accesses_before_the_wait(before, early):
    assert sass.early_accesses(PRODUCTS) == []
    planted = PRODUCTS.replace(before, f"{early} ;\n        /*0038*/                   {before}")
    assert sass.early_accesses(planted) == [early]


@pytest.mark.parametrize(("late", "counts"), [("MOV R181, R2", 1), ("MOV R2, R181", 0)])
def test_writes_after_the_fence(late, counts):
    product = "HGMMA.64x64x16.F32.BF16 R88, R180"
    lines = ["WARPGROUP.ARRIVE", late, product]
    fenced = " ;\n        /*0038*/                   ".join(lines)
    assert sass.late_writes(PRODUCTS.replace(product, fenced)) == [late] * counts
