// Memory of one worker for the length of one call: tiles, packed operands, running softmax state.
#pragma once

#include <new>

#include "cpu/base/simd.h"

namespace fastattn::FASTATTN_ISA {

// Hands out 64-byte-aligned blocks and frees them all at the end. A worker takes a few large
// blocks, never inside a loop. The first ones come from memory that a thread keeps for its next
// call: allocating them each time took a third of the time of a small problem.
class Scratch {
 public:
  Scratch() : kept_(Kept::take()) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (kept_ != nullptr) kept_->taken = false;
    while (last_ != nullptr) {
      const Footer of = *last_;
      ::operator delete(of.block, std::align_val_t(kAlign));
      last_ = of.previous;
    }
  }

  // `count` uninitialised floats. kSlack bytes beyond them may be read and written, so that vector
  // code needs no tails.
  float* floats(int64_t count) { return of<float>(count); }
  int32_t* ints(int64_t count) { return of<int32_t>(count); }
  template <typename T>
  T* of(int64_t count) {
    static_assert(std::is_trivially_destructible_v<T>, "nothing here is destroyed");
    return static_cast<T*>(bytes(count * static_cast<int64_t>(sizeof(T))));
  }

 private:
  // Behind its block, so that AddressSanitizer sees what is read before a block.
  struct Footer {
    char* block;
    Footer* previous;
  };
  static constexpr int64_t kAlign = 64, kSlack = 64;
#ifdef __SANITIZE_ADDRESS__
  static constexpr int64_t kKeptBytes = 0;  // blocks beside each other would have no borders
#else
  static constexpr int64_t kKeptBytes = 512 << 10;
#endif

  // A thread's own memory, used by one Scratch at a time.
  struct Kept {
    char* data = static_cast<char*>(::operator new(kKeptBytes, std::align_val_t(kAlign)));
    bool taken = false;
    ~Kept() { ::operator delete(data, std::align_val_t(kAlign)); }

    static Kept* take() {
      static thread_local Kept kept;
      if (kept.taken) return nullptr;
      kept.taken = true;
      return &kept;
    }
  };

  void* bytes(int64_t count) {
    const int64_t size = (count + kSlack + kAlign - 1) / kAlign * kAlign;
    if (kept_ != nullptr && used_ + size <= kKeptBytes) {
      used_ += size;
      return kept_->data + used_ - size;
    }
    const auto whole = static_cast<size_t>(size) + sizeof(Footer);
    auto* const block = static_cast<char*>(::operator new(whole, std::align_val_t(kAlign)));
    last_ = new (block + size) Footer{block, last_};
    return block;
  }

  Footer* last_ = nullptr;
  Kept* kept_;
  int64_t used_ = 0;
};

// Rounds n up to a multiple of `multiple`.
FASTATTN_SIMD int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace fastattn::FASTATTN_ISA
