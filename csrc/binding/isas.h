// The operators for instruction sets: which one runs, which can be forced, and one that forces one.
// Another operator forces a path.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace fastattn::binding {

inline std::string cpu_isa() { return cpu::selected_isa(); }
inline std::vector<std::string> cpu_isas() { return cpu::available_isas(); }

// Unboxed by hand, because torch's stable ABI never frees what it makes of a str.
template <bool (*kSelect)(const char*)>
void select_by_name(StableIValue* stack, uint64_t, uint64_t) {
  const auto name = torch::stable::detail::to<StringHandle>(stack[0]);
  const char* letters = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(name, &letters));
  const bool selected = kSelect(letters);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(name));
  stack[0] = torch::stable::detail::from(selected);
}

}  // namespace fastattn::binding
