"""Counting instructions, on an artificial listing."""

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
    assert sass.gradient_loops(LISTING) == [{"slots": 3, "mufu": 1, "local": 0}]
