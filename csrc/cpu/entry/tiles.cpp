// What the kernels of one instruction set (FASTATTN_ISA) share: base/shared.h.
#define FASTATTN_TILES
#include "cpu/loop/backward.h"
#include "cpu/loop/forward.h"
#include "cpu/score/values.h"
#include "cpu/tile/find_masking.h"
