// Counts what a process asks of malloc and its kin: preloaded, it stands before glibc's own.
//
// Sizes are those asked for, kept by address in an open table (linear probing), so that what was
// allocated in any way can be freed in any way. One lock guards it: what is counted is exact with
// any number of threads. Memory that is mapped directly (thread stacks, files, pymalloc's arenas)
// is not malloc's and does not count.

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);
}

namespace {

constexpr uint64_t kSlots = 1 << 22;
struct Slot {
  uintptr_t address;
  size_t size;
};
Slot table[kSlots];  // zero pages until touched
std::atomic_flag lock = ATOMIC_FLAG_INIT;
int64_t live = 0, peak = 0, count = 0;
int64_t large = 0, large_peak = 0;  // blocks of a KiB and more: tensors and workspaces, not objects
constexpr size_t kLarge = 1024;

uint64_t home(uintptr_t address) {
  return ((address >> 4) * 0x9E3779B97F4A7C15ull) >> (64 - 22);
}

struct Guard {
  Guard() { while (lock.test_and_set(std::memory_order_acquire)) {} }
  ~Guard() { lock.clear(std::memory_order_release); }
};

void add(void* p, size_t size) {
  if (p == nullptr) return;
  Guard guard;
  if (++count > (int64_t)(kSlots - kSlots / 8)) abort();  // the table would lose its way
  uint64_t at = home((uintptr_t)p);
  while (table[at].address != 0) at = (at + 1) % kSlots;
  table[at] = {(uintptr_t)p, size};
  live += (int64_t)size;
  if (live > peak) peak = live;
  if (size >= kLarge && (large += (int64_t)size) > large_peak) large_peak = large;
}

void drop(void* p) {
  if (p == nullptr) return;
  Guard guard;
  uint64_t at = home((uintptr_t)p);
  while (table[at].address != (uintptr_t)p) {
    if (table[at].address == 0) return;  // the dynamic loader's, before this library was there
    at = (at + 1) % kSlots;
  }
  live -= (int64_t)table[at].size;
  if (table[at].size >= kLarge) large -= (int64_t)table[at].size;
  --count;
  for (uint64_t next = (at + 1) % kSlots; table[next].address != 0; next = (next + 1) % kSlots) {
    uint64_t wanted = home(table[next].address);  // close the gap: no tombstones
    if ((next - wanted) % kSlots >= (next - at) % kSlots) {
      table[at] = table[next];
      at = next;
    }
  }
  table[at] = {0, 0};
}

void* added(void* p, size_t size) {
  add(p, size);
  return p;
}

}  // namespace

extern "C" {

void* malloc(size_t size) { return added(__libc_malloc(size), size); }
void* calloc(size_t n, size_t size) { return added(__libc_calloc(n, size), n * size); }
void* memalign(size_t align, size_t size) { return added(__libc_memalign(align, size), size); }
void* aligned_alloc(size_t align, size_t size) { return memalign(align, size); }
void* valloc(size_t size) { return memalign(4096, size); }
void* pvalloc(size_t size) { return memalign(4096, (size + 4095) / 4096 * 4096); }

int posix_memalign(void** out, size_t align, size_t size) {
  void* p = memalign(align, size);
  if (p == nullptr) return ENOMEM;
  *out = p;
  return 0;
}

void free(void* p) {
  drop(p);
  __libc_free(p);
}

void* realloc(void* p, size_t size) {
  // Where the block moves both are alive for a moment; that moment is glibc's and is not counted.
  drop(p);
  return added(__libc_realloc(p, size), size);
}

void* reallocarray(void* p, size_t n, size_t size) { return realloc(p, n * size); }

int64_t tracker_live() {
  Guard guard;
  return live;
}

int64_t tracker_peak() {
  Guard guard;
  return peak;
}

int64_t tracker_large() {
  Guard guard;
  return large;
}

int64_t tracker_large_peak() {
  Guard guard;
  return large_peak;
}

void tracker_restart() {
  Guard guard;
  peak = live, large_peak = large;
}
}
