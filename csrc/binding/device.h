// The device that this compilation is for, as namespace fastattn::device.
#pragma once

#ifdef FASTATTN_FOR_CUDA
#include "binding/on_cuda.h"
#else
#include "binding/on_cpu.h"
#endif
