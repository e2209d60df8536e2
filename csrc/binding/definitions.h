// Defines the operators by their schemas, those of the CUDA library as well. An exported program
// that uses them thus needs no Python. Included once.
#pragma once

#include <torch/csrc/stable/library.h>

// Exists from torch 2.12 on. Before, it is nullptr, and operators get no tag.
extern "C" __attribute__((weak)) int32_t torch_tag_pt2_compliant_tag();
extern "C" __attribute__((weak)) AOTITorchError torch_library_def_with_tags(TorchLibraryHandle,
                                                                            const char* schema,
                                                                            const int32_t* tags,
                                                                            int32_t num_tags);

namespace fastattn::binding {

constexpr const char* kSchemas[] = {
#include "schemas.inc"
};

class Definitions {
 public:
  Definitions() {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_library_init_fragment("fastattn", __FILE__, __LINE__, &library_));
    for (const char* schema : kSchemas) define(schema);
  }
  ~Definitions() { aoti_torch_delete_library_object(library_); }
  Definitions(const Definitions&) = delete;
  Definitions& operator=(const Definitions&) = delete;

 private:
  void define(const char* schema) {
    if (torch_library_def_with_tags == nullptr || torch_tag_pt2_compliant_tag == nullptr) {
      TORCH_ERROR_CODE_CHECK(aoti_torch_library_def(library_, schema));
    } else {
      const int32_t tag = torch_tag_pt2_compliant_tag();
      TORCH_ERROR_CODE_CHECK(torch_library_def_with_tags(library_, schema, &tag, 1));
    }
  }

  TorchLibraryHandle library_ = nullptr;
};

}  // namespace fastattn::binding
