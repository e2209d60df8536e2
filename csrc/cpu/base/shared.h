// Functions that several entries of an instruction set call, and that are compiled once for it.
//
//   FASTATTN_SHARED void f();        a header declares them
//   #ifdef FASTATTN_SHARED_CODE      and defines them for entry/tiles.cpp
//
// A set with tile products is one file (entry/unit.cpp) instead, which has what it calls for
// itself.
#pragma once

#if defined(FASTATTN_TILES)
#define FASTATTN_SHARED
#define FASTATTN_SHARED_CODE
#elif defined(FASTATTN_ALONE)
#define FASTATTN_SHARED [[maybe_unused, gnu::noinline]] static
#define FASTATTN_SHARED_CODE
#else
#define FASTATTN_SHARED
#endif
