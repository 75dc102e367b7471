// The two kernels on the CPU. Each row is read once, and differences and sums stay in float64 registers.
//
// A block (blocks.py) is summed in eight lanes, for every register width. Lane l adds the entries at the positions
// l, l + 8, ... of the block, with one fused multiply-add each. The lanes are then added in a fixed order. The result
// therefore does not depend on the processor, on the thread, or on the tensors that contain the entries. Streaming
// stores bypass the cache on request: a target that is not read needs no cache line.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 8;  // partial sums of a block
constexpr int MAX_ROWS = 64;  // rows whose products are computed while they are in the cache
constexpr int TILE = 512;  // entries of a tile: 4 KiB in float64
constexpr int FEW_ROWS = 16, SHORT_TILE = 256;  // up to FEW_ROWS rows use shorter tiles, which fit into the L1 cache
constexpr int MIN_TILE_ENTRIES = 64;  // the smallest piece that gets its own tile
constexpr int MAX_UNTILED_ROWS = 8;  // the largest number of rows that are combined without tiles
constexpr int ROWS_PER_PASS = 4;  // rows that are added to a tile in one pass
constexpr int PREFETCH_BYTES = 512;  // prefetch distance in bytes, if few rows are read at once

// WIDTH: entries per register. PANEL: rows and columns of a square of products whose sums and factors fit into the
// registers. MAX_SINGLE_PANEL: rows that form a single panel, with some sums in memory. AVX has 16 registers, AVX-512
// and NEON have 32.
#if defined(__AVX512F__)
constexpr int WIDTH = 8, PANEL = 5, MAX_SINGLE_PANEL = 7;
#elif defined(__ARM_NEON)
constexpr int WIDTH = 2, PANEL = 3, MAX_SINGLE_PANEL = 5;
#else
constexpr int WIDTH = 4, PANEL = 3, MAX_SINGLE_PANEL = 5;
#endif
constexpr int VECTORS_PER_SUM = LANES / WIDTH;
constexpr int ACCUMULATORS = 12;  // independent sums that hide the latency of an addition
constexpr int MAX_INTERLEAVED_BLOCKS = 4;  // largest number of interleaved blocks, if one block has too few sums
// Loops over arrays of registers. An array stays in registers only if every index is a compile-time constant.
#define UNROLLED _Pragma("GCC unroll 32")
typedef double V __attribute__((vector_size(8 * WIDTH)));
typedef float F __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t I __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t H __attribute__((vector_size(2 * WIDTH)));

// A bfloat16 number, which is the upper half of a float. A double is rounded to float first, as in torch, and then to
// the nearest bfloat16 number, ties to even. The second rounding adds half a unit of the last retained bit minus one,
// plus one if this bit is odd. A NaN is handled separately, because the carry could make it an infinity.
struct bf16 {
  uint16_t bits;
  operator double() const { uint32_t u = uint32_t(bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
  bf16() = default;
  explicit bf16(double value) {
    float f = float(value);
    uint32_t u;
    std::memcpy(&u, &f, 4);
    bits = f != f ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
};
struct f16 {
  _Float16 value;
  operator double() const { return double(float(value)); }
  f16() = default;
  // A double is rounded to float first, as in torch. Direct rounding from double can break ties differently.
  explicit f16(double x) : value(_Float16(float(x))) {}
};

struct Vec { char* data; int64_t stride, dtype; };  // strides in entries; dtype: 0 f32, 1 f64, 2 bf16, 3 f16
struct Block { int64_t start, stop, segment; };
constexpr int64_t ITEM_SIZES[] = {4, 8, 2, 2};
bool same(const Vec& x, const Vec& y) { return x.data == y.data && x.stride == y.stride && x.dtype == y.dtype; }

// Call call.operator()<T>() with the type that a dtype number encodes, or <N>() with a number up to N.
template <class Call> __attribute__((always_inline)) inline void dispatch_dtype(int64_t dtype, const Call& call) {
  switch (dtype) {
    case 0: return call.template operator()<float>();
    case 1: return call.template operator()<double>();
    case 2: return call.template operator()<bf16>();
    default: return call.template operator()<f16>();
  }
}
template <int N, class Call> void dispatch_count(int64_t n, const Call& call) {
  if (n == N) return call.template operator()<N>();
  if constexpr (N > 1) dispatch_count<N - 1>(n, call);
}
// More than MAX_SINGLE_PANEL rows are divided into panels of at most PANEL rows, which have one of these sizes.
template <class Call> void dispatch_panel_size(int64_t n, const Call& call) {
  if (n == PANEL) return call.template operator()<PANEL>();
  if (n == PANEL - 1) return call.template operator()<PANEL - 1>();
  if constexpr (PANEL > 3) return call.template operator()<PANEL - 2>();
}

// The conversions use explicit instructions, because compilers generate several instructions for a converted vector.
V to_double(F f) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtps_pd((__m256)f);
#elif defined(__AVX__)
  return (V)_mm256_cvtps_pd((__m128)f);
#else
  return __builtin_convertvector(f, V);
#endif
}
F to_float(V v) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtpd_ps((__m512d)v);
#elif defined(__AVX__)
  return (F)_mm256_cvtpd_ps((__m256d)v);
#else
  return __builtin_convertvector(v, F);
#endif
}

// Vectors are loaded with memcpy, because addresses may be unaligned.
template <class T> V load(const T* p) {
  V v;
  for (int l = 0; l < WIDTH; l++) v[l] = double(p[l]);
  return v;
}
template <> V load(const double* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <> V load(const float* p) { F f; std::memcpy(&f, p, sizeof f); return to_double(f); }
#if defined(__AVX512F__)
template <> V load(const bf16* p) {
  // A shuffle of two copies needs one instruction per half, in contrast to widening and shifting.
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  const __m256i upper = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                         -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return to_double((F)_mm256_shuffle_epi8(both, upper));
}
#if defined(__F16C__)
template <> V load(const f16* p) { return to_double((F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))); }
#endif
#elif defined(__AVX2__)
template <> V load(const bf16* p) {
  return to_double((F)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p)), 16));
}
#if defined(__F16C__)
template <> V load(const f16* p) { return to_double((F)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p))); }
#endif
#endif

// A streaming store bypasses the cache, for a target that is not read soon. Its address must be a multiple of the
// stored size.
template <class X> void store_vector(X x, void* p, bool streaming) {
#if defined(__x86_64__)
  if (streaming) {
#if defined(__AVX512F__)
    if constexpr (sizeof x == 64) return _mm512_stream_si512((__m512i*)p, (__m512i)x);
#endif
#if defined(__AVX__)
    if constexpr (sizeof x == 32) return _mm256_stream_si256((__m256i*)p, (__m256i)x);
#endif
    if constexpr (sizeof x == 16) return _mm_stream_si128((__m128i*)p, (__m128i)x);
    if constexpr (sizeof x == 8) return _mm_stream_si64((long long*)p, (long long)x);
  }
#endif
  std::memcpy(p, &x, sizeof x);
}
template <class T> void store(T* p, V v, bool) { for (int l = 0; l < WIDTH; l++) p[l] = T(v[l]); }
template <> void store(double* p, V v, bool streaming) { store_vector(v, p, streaming); }
template <> void store(float* p, V v, bool streaming) { store_vector(to_float(v), p, streaming); }
// Round a whole register in the same way as struct bf16. The results are in the upper halves of the entries.
I bf16_bits(V v) {
  const F f = to_float(v);
  const I u = (I)f, nearest = u + 0x7fff + ((u >> 16) & 1);
  return f == f ? nearest : I{} + 0x7fc00000;
}
template <> void store(bf16* p, V v, bool streaming) { store_vector(__builtin_convertvector(bf16_bits(v) >> 16, H), p, streaming); }
#if defined(__AVX512F__) && defined(__F16C__)
template <> void store(f16* p, V v, bool streaming) {
  store_vector((H)_mm256_cvtps_ph((__m256)to_float(v), _MM_FROUND_TO_NEAREST_INT), p, streaming);
}
#elif defined(__F16C__)
template <> void store(f16* p, V v, bool streaming) {
  store_vector((H)_mm_cvtsi128_si64(_mm_cvtps_ph((__m128)to_float(v), _MM_FROUND_TO_NEAREST_INT)), p, streaming);
}
#endif

// Two registers of adjacent entries that are processed independently. For bf16, one holds the even entries and one the
// odd entries, which saves conversions.
struct VectorPair { V a, b; };
template <class T> VectorPair load_pair(const T* p) { return {load(p), load(p + WIDTH)}; }
template <class T> void store_pair(T* p, VectorPair v, bool streaming) { store(p, v.a, streaming), store(p + WIDTH, v.b, streaming); }
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
template <> VectorPair load_pair(const bf16* p) {
  I u;
  std::memcpy(&u, p, sizeof u);
  return {to_double((F)(u << 16)), to_double((F)(u & 0xffff0000))};
}
template <> void store_pair(bf16* p, VectorPair v, bool streaming) { store_vector(bf16_bits(v.a) >> 16 | (bf16_bits(v.b) & 0xffff0000), p, streaming); }
#endif

// a * b + c, rounded once on every processor. Without a hardware instruction, fma of the C library is slow, but has the
// same bits.
V fma(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (V)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  for (int l = 0; l < WIDTH; l++) c[l] = __builtin_fma(a[l], b[l], c[l]);
  return c;
#endif
}

// Force the compiler to keep a value in a register.
void keep_in_register([[maybe_unused]] V& v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__AVX__)
  __asm__("" : "+x"(v));
#elif defined(__ARM_NEON)
  __asm__("" : "+w"(v));
#endif
}

// Load n entries of a vector of any dtype and stride into `to`. With SUBTRACT, subtract them from the values in `to`.
template <bool SUBTRACT> void load_as_double(const Vec& x, int64_t p, int64_t n, double* to) {
  dispatch_dtype(x.dtype, [&]<class T>() {
    const T* from = (const T*)x.data + p * x.stride;
    // Stride 1 is a separate loop, which the compiler can vectorise.
    if (x.stride == 1) for (int64_t i = 0; i < n; i++) to[i] = SUBTRACT ? to[i] - double(from[i]) : double(from[i]);
    else for (int64_t i = 0; i < n; i++) to[i] = SUBTRACT ? to[i] - double(from[i * x.stride]) : double(from[i * x.stride]);
  });
}

// Vectors that consist of several tensors. Piece i starts at edges[i], and the descriptor of its part of row j is at
// j * count + i.
struct Pieces {
  int64_t count;
  const int64_t* edges;
  int64_t piece_at(int64_t p) const { return std::upper_bound(edges, edges + count, p) - edges - 1; }
  // Call work(piece, start, stop) in order for each part of [start, stop) that is within one piece.
  template <class Work> void for_each_piece(int64_t start, int64_t stop, const Work& work) const {
    for (int64_t i = start < stop ? piece_at(start) : 0; start < stop; i++) {
      const int64_t end = std::min(stop, edges[i + 1]);
      if (start < end) work(i, start, end);
      start = std::max(start, end);
    }
  }
};

// ---- gram

struct Operands {
  int64_t k;
  Pieces pieces;
  const Vec *plus, *minus;  // minus: data is null if nothing is subtracted
  const Vec& row(int64_t i, int64_t piece) const { return plus[i * pieces.count + piece]; }
  const Vec& less(int64_t i, int64_t piece) const { return minus[i * pieces.count + piece]; }
};

// Rows with entries of `item` bytes that are prefetched during other products, so that memory access and arithmetic
// overlap.
struct Prefetcher {
  const char* const* rows;
  int64_t count, item;
  // Prefetch one of `parts` parts of the rows into L2: the n entries after the next n. This runs before the products,
  // because the registers of both would not fit at once. It is inline because compilers drop calls without side effects.
  __attribute__((always_inline)) void prefetch(int64_t part, int64_t parts, int64_t n) const {
    const int64_t low = part * count / parts, high = (part + 1) * count / parts;
    for (int64_t at = n * item; at < 2 * n * item; at += 64)
      for (int64_t r = low; r < high; r++) __builtin_prefetch(rows[r] + at, 0, 2);
  }
};

// Multiply M rows by N other rows, over n entries, a multiple of the vector length. Add to the sums, stored as M rows
// of N.
template <int M, int N>
__attribute__((noinline)) void panel_products(const double* const* a, const double* const* b, int64_t n, V* sums) {
  // Several sums at once hide the latency of an addition. Only so many are used that they fit into the registers.
  constexpr int PARTS_PER_PASS = M * N * VECTORS_PER_SUM <= 12 ? VECTORS_PER_SUM : 1;
  const double *left[M], *right[N];
  UNROLLED for (int i = 0; i < M; i++) left[i] = a[i];
  UNROLLED for (int j = 0; j < N; j++) right[j] = b[j];
  for (int part = 0; part < VECTORS_PER_SUM; part += PARTS_PER_PASS) {
    V total[M][N][PARTS_PER_PASS];
    UNROLLED for (int i = 0; i < M; i++)
      UNROLLED for (int j = 0; j < N; j++)
        UNROLLED for (int h = 0; h < PARTS_PER_PASS; h++) total[i][j][h] = sums[(i * N + j) * VECTORS_PER_SUM + part + h];
    auto step = [&](int64_t p) __attribute__((always_inline)) {
      UNROLLED for (int h = 0; h < PARTS_PER_PASS; h++) {
        const int64_t q = p + (part + h) * WIDTH;
        // Load each value once. Compilers would reload it for each multiplication, and the loads would limit the speed.
        V x[M];
        UNROLLED for (int i = 0; i < M; i++) keep_in_register(x[i] = load(left[i] + q));
        UNROLLED for (int j = 0; j < N; j++) {
          V y = load(right[j] + q);
          keep_in_register(y);
          UNROLLED for (int i = 0; i < M; i++) total[i][j][h] = fma(x[i], y, total[i][j][h]);
        }
      }
    };
    int64_t p = 0;
    for (; p + 2 * LANES <= n; p += 2 * LANES) step(p), step(p + LANES);
    for (; p < n; p += LANES) step(p);
    UNROLLED for (int i = 0; i < M; i++)
      UNROLLED for (int j = 0; j < N; j++)
        UNROLLED for (int h = 0; h < PARTS_PER_PASS; h++) sums[(i * N + j) * VECTORS_PER_SUM + part + h] = total[i][j][h];
  }
}

// The source of the rows of a product:
// - memory: the rows are read once and prefetched by PREFETCH_BYTES.
// - memory_to_lines: the rows are read from memory and also copied to float64 lines.
// - lines: the rows are read from float64 lines.
enum class Source { memory, memory_to_lines, lines };

// Multiply M rows by one another, in B interleaved blocks. Rows a[i * M] to a[i * M + M - 1] belong to block i. Add to
// the sums, block by block and row by row up to the diagonal.
template <class T, int M, bool SUBTRACT, int B, Source SOURCE>
__attribute__((noinline)) void diagonal_products(const T* const* a, const T* const* less, int64_t n, V* sums,
                                      double* lines = nullptr, int64_t pitch = 0) {
  constexpr int LINE = 64 / sizeof(T);
  constexpr int COUNT = M * (M + 1) / 2;
  const T *from[B][M], *minus[B] = {};
  V total[B][COUNT][VECTORS_PER_SUM];
  UNROLLED for (int b = 0; b < B; b++) {
    UNROLLED for (int i = 0; i < M; i++) from[b][i] = a[b * M + i];
    if (SUBTRACT) minus[b] = less[b];
    UNROLLED for (int t = 0; t < COUNT; t++)
      UNROLLED for (int h = 0; h < VECTORS_PER_SUM; h++) total[b][t][h] = sums[(b * COUNT + t) * VECTORS_PER_SUM + h];
  }
  auto step = [&](int64_t p) __attribute__((always_inline)) {
    UNROLLED for (int b = 0; b < B; b++)
      UNROLLED for (int h = 0; h < VECTORS_PER_SUM; h++) {
        const int64_t q = p + h * WIDTH;
        const V c = SUBTRACT ? load(minus[b] + q) : V{};
        V x[M];
        UNROLLED for (int i = 0; i < M; i++) {
          x[i] = SUBTRACT ? load(from[b][i] + q) - c : load(from[b][i] + q);
          if (SOURCE == Source::memory_to_lines) store_vector(x[i], lines + i * pitch + q, false);
          UNROLLED for (int j = 0; j <= i; j++) {
            V& sum = total[b][i * (i + 1) / 2 + j][h];
            sum = fma(x[i], x[j], sum);
          }
        }
      }
  };
  int64_t p = 0;
  for (; p + LINE <= n; p += LINE) {
    if (SOURCE == Source::memory)
      UNROLLED for (int b = 0; b < B; b++) {
        UNROLLED for (int i = 0; i < M; i++) __builtin_prefetch((const char*)(from[b][i] + p) + PREFETCH_BYTES);
        if (SUBTRACT) __builtin_prefetch((const char*)(minus[b] + p) + PREFETCH_BYTES);
      }
    for (int l = 0; l < LINE; l += LANES) step(p + l);
  }
  for (; p < n; p += LANES) step(p);
  UNROLLED for (int b = 0; b < B; b++)
    UNROLLED for (int t = 0; t < COUNT; t++)
      UNROLLED for (int h = 0; h < VECTORS_PER_SUM; h++) sums[(b * COUNT + t) * VECTORS_PER_SUM + h] = total[b][t][h];
}

// The number of blocks of M rows that are summed at the same time.
template <int M> constexpr int interleaved_blocks() { return std::clamp(ACCUMULATORS / (M * (M + 1) / 2 * VECTORS_PER_SUM), 1, MAX_INTERLEAVED_BLOCKS); }

// Read n entries, from position p on, of the rows from..to into float64 lines with the distance `pitch`. Rows may have
// any dtypes, strides and pieces. The padding after the last entry of a block is zero, so that whole vectors can be
// summed.
void gather_rows(const Operands& rows, int64_t from, int64_t to, int64_t p, int64_t n, double* lines, int64_t pitch) {
  rows.pieces.for_each_piece(p, p + n, [&](int64_t piece, int64_t start, int64_t stop) {
    const int64_t low = start - rows.pieces.edges[piece];
    for (int64_t i = from; i < to; i++) {
      double* line = lines + (i - from) * pitch + (start - p);
      load_as_double<false>(rows.row(i, piece), low, stop - start, line);
      if (rows.less(i, piece).data) load_as_double<true>(rows.less(i, piece), low, stop - start, line);
    }
  });
  for (int64_t i = 0; i < to - from; i++)
    std::fill(lines + i * pitch + n, lines + i * pitch + (n + LANES - 1) / LANES * LANES, 0.0);
}

// Return whether rows from..to match row `first` in one piece: the same dtype, stride 1, and the same subtrahend or
// none.
bool is_uniform(const Operands& rows, int64_t first, int64_t from, int64_t to, int64_t piece) {
  const Vec &like = rows.row(first, piece), &less = rows.less(first, piece);
  if (less.data && (less.dtype != like.dtype || less.stride != 1)) return false;
  for (int64_t j = from; j < to; j++) {
    const Vec& row = rows.row(j, piece);
    if (row.dtype != like.dtype || row.stride != 1 || !same(rows.less(j, piece), less)) return false;
  }
  return true;
}

// Divide n into the fewest parts of at most `most`, whose sizes differ by at most one.
struct EvenSplit {
  int64_t n, count;
  EvenSplit(int64_t n, int64_t most) : n(n), count((n + most - 1) / most) {}
  int64_t edge(int64_t q) const { return q * (n / count) + std::min(q, n % count); }
};

// Return the number of entries of the next tile, which starts at p. If the current piece has enough entries, the tile
// is within it: up to `most` entries, whole vectors, and `piece` is set to its index. Otherwise, pieces are gathered
// into the lines of a tile until a piece has enough entries, and `piece` is -1.
int64_t next_tile_length(const Pieces& pieces, int64_t p, int64_t stop, int64_t most, int64_t& piece) {
  int64_t limit = std::min(stop, p + most);
  int64_t i = pieces.piece_at(p);
  const int64_t whole = (std::min(limit, pieces.edges[i + 1]) - p) / LANES * LANES;
  piece = whole >= MIN_TILE_ENTRIES || whole == limit - p ? i : -1;
  if (piece >= 0) return whole;
  limit = std::min<int64_t>(stop, p + TILE);
  int64_t end = p;
  while (end < limit) {
    while (pieces.edges[i + 1] <= end) i++;
    const int64_t last = std::min(limit, pieces.edges[i + 1]);
    if (end > p && last - end >= MIN_TILE_ENTRIES) break;
    end = p + (last - p + LANES - 1) / LANES * LANES;
  }
  return std::min(end, limit) - p;
}

// Add the lanes in a fixed order, so that a sum depends only on the entries of its block.
double sum_lanes(const V* parts) {
  double l[LANES];
  std::memcpy(l, parts, sizeof l);
  return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

// Multiply m rows by one another or by others, panel by panel, with as many sums at a time as fit into the registers.
struct Panels {
  int64_t m, others;
  bool is_single() const { return !others && m <= MAX_SINGLE_PANEL; }
  EvenSplit down() const { return {m, is_single() ? MAX_SINGLE_PANEL : PANEL}; }
  EvenSplit along() const { return {others ? others : m, is_single() ? MAX_SINGLE_PANEL : PANEL}; }
  int64_t turns() const { return others ? down().count * along().count : down().count * (down().count + 1) / 2; }
  // Call work(i, M, j, N) for the rows i to i + M and j to j + N. Without others, i == j means products within a panel.
  // They come before the products of this panel with earlier panels.
  template <class Work> void for_each_pair(const Work& work) const {
    const EvenSplit down = this->down(), along = this->along();
    for (int64_t q = 0; q < down.count; q++) {
      const int64_t i = down.edge(q), high = down.edge(q + 1) - i;
      if (!others) work(i, high, i, high);
      for (int64_t r = 0; r < (others ? along.count : q); r++)
        work(i, high, along.edge(r), along.edge(r + 1) - along.edge(r));
    }
  }
};

// Multiply n entries of rows in float64 lines; the others follow the first m. The sums are consecutive. With
// WRITE_LINES, the first rows come from `read`, followed by the subtrahend, and the diagonal products write the lines.
template <class T, bool SUBTRACT, bool WRITE_LINES>
void tile_products(Panels panels, const T* const* read, double* lines, int64_t pitch, int64_t n, V* sums, Prefetcher next) {
  const double *line[2 * MAX_ROWS], *const* other = line + (panels.others ? panels.m : 0);
  for (int64_t i = 0; i < panels.m + panels.others; i++) line[i] = lines + i * pitch;
  int64_t turn = 0;
  panels.for_each_pair([&](int64_t i, int64_t high, int64_t j, int64_t wide) {
    next.prefetch(turn++, panels.turns(), n);
    if (panels.others || i != j) {
      dispatch_panel_size(high, [&]<int M>() { dispatch_panel_size(wide, [&]<int N>() { panel_products<M, N>(line + i, other + j, n, sums); }); });
      sums += high * wide * VECTORS_PER_SUM;
      return;
    }
    if constexpr (WRITE_LINES)
      dispatch_panel_size(high, [&]<int M>() {
        diagonal_products<T, M, SUBTRACT, 1, Source::memory_to_lines>(read + i, read + panels.m, n, sums, lines + i * pitch, pitch);
      });
    else dispatch_count<MAX_SINGLE_PANEL>(high, [&]<int M>() { diagonal_products<double, M, false, 1, Source::lines>(line + i, nullptr, n, sums); });
    sums += high * (high + 1) / 2 * VECTORS_PER_SUM;
  });
}

// The sums over the first `entries` entries of a block, if the caller has already computed them. They exist only for
// few rows, and `entries` is a multiple of LANES.
struct PartialSums { int64_t entries = 0; const V* sums = nullptr; };

// Compute the sums over a block of the products of some rows with some others, or with one another.
void block_products(const Operands& rows, Block b, int64_t first, int64_t m, int64_t other, int64_t n, double* to,
              PartialSums begun = {}) {
  // Reused for all blocks, so that a thread allocates memory once.
  static thread_local std::vector<V> sums, lines;
  const int64_t others = first == other ? 0 : n, count = m + others;
  const Panels panels{m, others};
  // For many rows, the sums need as much memory as the lines. Each tile loads and stores them, so tiles are long.
  const int64_t tile = count <= FEW_ROWS ? SHORT_TILE : TILE;
  if (begun.sums) sums.assign(begun.sums, begun.sums + m * (m + 1) / 2 * VECTORS_PER_SUM);
  else sums.assign(m * n * VECTORS_PER_SUM, V{});
  const char* from[2 * MAX_ROWS + 1];
  for (int64_t p = b.start + begun.entries, taken, piece; p < b.stop; p += taken) {
    const int64_t at = rows.pieces.piece_at(p);
    const Vec &like = rows.row(first, at), &less = rows.less(first, at);
    // Few rows need no lines, so the whole rest of the block is processed at once.
    taken = next_tile_length(rows.pieces, p, b.stop, panels.is_single() ? b.stop - b.start : tile, piece);
    const bool plain =
        piece >= 0 && is_uniform(rows, first, first, first + m, piece) && is_uniform(rows, first, other, other + others, piece);
    const int64_t item = ITEM_SIZES[like.dtype];
    int64_t announced = 0;
    if (plain) {
      const int64_t low = (p - rows.pieces.edges[piece]) * item;
      for (int64_t i = 0; i < count; i++) from[i] = rows.row(i < m ? first + i : other + i - m, piece).data + low;
      from[count] = less.data + low;
      announced = count + (less.data != nullptr);
    }
    if (plain && panels.is_single()) {
      dispatch_dtype(like.dtype, [&]<class T>() {
        dispatch_count<MAX_SINGLE_PANEL>(m, [&]<int M>() {
          const T* const* row = (const T* const*)from;
          less.data ? diagonal_products<T, M, true, 1, Source::memory>(row, row + M, taken, sums.data())
                    : diagonal_products<T, M, false, 1, Source::memory>(row, nullptr, taken, sums.data());
        });
      });
      continue;
    }
    taken = std::min<int64_t>(taken, tile);
    // The pitch is not a power of two. Otherwise, the lines would map to the same cache sets.
    const int64_t whole = (taken + LANES - 1) / LANES * LANES, pitch = whole + LANES;
    lines.resize(count * pitch / WIDTH);
    double* data = (double*)lines.data();
    const Prefetcher next{from, announced, item};
    if (plain && !others) {
      dispatch_dtype(like.dtype, [&]<class T>() {
        const T* const* row = (const T* const*)from;
        less.data ? tile_products<T, true, true>(panels, row, data, pitch, whole, sums.data(), next)
                  : tile_products<T, false, true>(panels, row, data, pitch, whole, sums.data(), next);
      });
    } else {
      gather_rows(rows, first, first + m, p, taken, data, pitch);
      gather_rows(rows, other, other + others, p, taken, data + m * pitch, pitch);
      tile_products<double, false, false>(panels, nullptr, data, pitch, whole, sums.data(), next);
    }
  }
  const V* sum = sums.data();
  panels.for_each_pair([&](int64_t i, int64_t high, int64_t j, int64_t wide) {
    const bool square = !others && i == j;
    for (int64_t x = first + i; x < first + i + high; x++)
      for (int64_t y = other + j; y < other + (square ? x - first + 1 : j + wide); y++, sum += VECTORS_PER_SUM)
        to[x * (x + 1) / 2 + y] = sum_lanes(sum);
  });
}

// Multiply M rows by one another over B blocks, each within one piece. The sums are interleaved up to the length of the
// shortest block. The rest follows block by block. M rows in a single block have too few sums to hide the latency.
template <int M, int B> void interleaved_products(const Operands& rows, const Block* table, double* to) {
  constexpr int COUNT = M * (M + 1) / 2;
  V sums[B * COUNT * VECTORS_PER_SUM] = {};
  const char* from[B * (M + 1)];
  int64_t n = INT64_MAX, at[B];
  for (int b = 0; b < B; b++) {
    at[b] = rows.pieces.piece_at(table[b].start);
    n = std::min(n, (table[b].stop - table[b].start) / LANES * LANES);
  }
  const Vec &like = rows.row(0, at[0]), &less = rows.less(0, at[0]);
  for (int b = 0; b < B; b++) {
    const Vec &row = rows.row(0, at[b]), &minus = rows.less(0, at[b]);
    const bool fits = table[b].stop <= rows.pieces.edges[at[b] + 1] && is_uniform(rows, 0, 0, M, at[b]);
    if (!fits || row.dtype != like.dtype || !minus.data != !less.data) { n = 0; break; }
    const int64_t low = (table[b].start - rows.pieces.edges[at[b]]) * ITEM_SIZES[like.dtype];
    for (int i = 0; i < M; i++) from[b * M + i] = rows.row(i, at[b]).data + low;
    from[B * M + b] = minus.data + low;
  }
  if (n > 0)
    dispatch_dtype(like.dtype, [&]<class T>() {
      const T* const* row = (const T* const*)from;
      less.data ? diagonal_products<T, M, true, B, Source::memory>(row, row + B * M, n, sums)
                : diagonal_products<T, M, false, B, Source::memory>(row, nullptr, n, sums);
    });
  for (int b = 0; b < B; b++)
    block_products(rows, table[b], 0, M, 0, M, to + b * COUNT, {n, sums + b * COUNT * VECTORS_PER_SUM});
}

// ---- combine

struct Term { Vec plus, minus; double c; };

// total += c (plus - minus) for K rows, with one rounding each. n is a multiple of the entries of a cache line.
template <class T, int K, bool SUBTRACT>
__attribute__((noinline)) void add_rows(const Term* terms, int64_t p, int64_t n, double* total) {
  constexpr int LINE = 64 / sizeof(T);
  const T *plus[K], *const minus = (const T*)terms[0].minus.data + p;
  V c[K];
  for (int j = 0; j < K; j++) plus[j] = (const T*)terms[j].plus.data + p, c[j] = V{} + terms[j].c;
  for (int64_t i = 0; i < n; i += LINE) {
    // Prefetch the same position of the next tile.
    for (int j = 0; j < K; j++) __builtin_prefetch(plus[j] + i + TILE, 0, 2);
    if (SUBTRACT) __builtin_prefetch(minus + i + TILE, 0, 2);
    for (int64_t q = i; q < i + LINE; q += WIDTH) {
      V sum = load(total + q);
      const V b = SUBTRACT ? load(minus + q) : V{};
      for (int j = 0; j < K; j++) sum = fma(c[j], SUBTRACT ? load(plus[j] + q) - b : load(plus[j] + q), sum);
      store_vector(sum, total + q, false);
    }
  }
}

// Combine all rows at once, from the base (or zero) to the result. Storing intermediate sums in a tile would limit the
// speed.
template <class T, int K, bool SUBTRACT>
__attribute__((noinline)) void combine_untiled(const Term* terms, int64_t n, const T* base, T* to, bool streaming, int64_t p) {
  constexpr int LINE = 64 / sizeof(T), STEP = std::max(LINE, 2 * WIDTH);
  const T *plus[K], *const minus = (const T*)terms[0].minus.data + p;
  V c[K];
  for (int j = 0; j < K; j++) plus[j] = (const T*)terms[j].plus.data + p, c[j] = V{} + terms[j].c;
  auto loop = [&](auto streams, auto starts) __attribute__((always_inline)) {
    for (int64_t i = 0; i < n; i += STEP) {
      for (int64_t l = i; l < i + STEP; l += LINE) {
        for (int j = 0; j < K; j++) __builtin_prefetch((const char*)(plus[j] + l) + PREFETCH_BYTES);
        if (SUBTRACT) __builtin_prefetch((const char*)(minus + l) + PREFETCH_BYTES);
        if (starts) __builtin_prefetch((const char*)(base + l) + PREFETCH_BYTES);
      }
      for (int64_t q = i; q < i + STEP; q += 2 * WIDTH) {
        VectorPair sum = starts ? load_pair(base + q) : VectorPair{};
        const VectorPair b = SUBTRACT ? load_pair(minus + q) : VectorPair{};
        for (int j = 0; j < K; j++) {
          const VectorPair x = load_pair(plus[j] + q);
          sum.a = fma(c[j], SUBTRACT ? x.a - b.a : x.a, sum.a);
          sum.b = fma(c[j], SUBTRACT ? x.b - b.b : x.b, sum.b);
        }
        store_pair(to + q, sum, streams);
      }
    }
  };
  // The flags are types and not values, so that the loops have no branches.
  using yes = std::true_type;
  using no = std::false_type;
  if (streaming) base ? loop(yes{}, yes{}) : loop(yes{}, no{});
  else base ? loop(no{}, yes{}) : loop(no{}, no{});
}

// Return how many of the next rows, at most `most`, have the same dtype, stride 1, and the same subtrahend or none.
int64_t count_uniform(const Term* terms, int64_t most) {
  const Vec &like = terms[0].plus, &less = terms[0].minus;
  if (like.stride != 1 || (less.data && (less.dtype != like.dtype || less.stride != 1))) return 0;
  int64_t n = 1;
  while (n < most && terms[n].plus.dtype == like.dtype && terms[n].plus.stride == 1 && same(terms[n].minus, less)) n++;
  return n;
}

void round_tile(const double* from, int64_t p, int64_t n, const Vec& out, bool streaming) {
  dispatch_dtype(out.dtype, [&]<class T>() {
    T* to = (T*)out.data + p * out.stride;
    int64_t i = 0;
    if (out.stride == 1) {
      if (streaming) for (; i + WIDTH <= n; i += WIDTH) store(to + i, load(from + i), true);
      else for (; i + WIDTH <= n; i += WIDTH) store(to + i, load(from + i), false);
    }
    for (; i < n; i++) to[i * out.stride] = T(from[i]);
  });
}

// base + sum of c (plus - minus), term by term in order, for the entries p..stop of one piece.
void combine_run(const Vec& base, const std::vector<Term>& terms, int64_t p, int64_t stop, const Vec& out, bool streaming) {
  alignas(64) double total[TILE], line[TILE];
  const int64_t size = ITEM_SIZES[out.dtype];
  const uintptr_t place = (uintptr_t)out.data + p * size;
  // An address that is not a multiple of the entry size never reaches a cache line boundary.
  streaming = streaming && place % size == 0 && out.stride == 1;
  // Streaming stores require aligned addresses and are fast for whole cache lines. The entries before the first cache
  // line are processed separately.
  int64_t n = streaming && place % 64 ? int64_t(64 - place % 64) / size : TILE;
  const int64_t count = terms.size();
  const int64_t dtype = out.dtype;
  auto fits = [&](const Vec& x) { return x.dtype == dtype && x.stride == 1; };
  const bool few = count > 0 && count <= MAX_UNTILED_ROWS && count_uniform(terms.data(), count) == count && fits(terms[0].plus) &&
                   fits(out) && (!base.data || fits(base));
  for (; p < stop; p += n, n = TILE) {
    n = std::min(n, stop - p);
    if (few && n >= 64) {
      n = (stop - p) / 64 * 64;
      dispatch_dtype(dtype, [&]<class T>() {
        dispatch_count<MAX_UNTILED_ROWS>(count, [&]<int K>() {
          const T* from = base.data ? (const T*)base.data + p : nullptr;
          T* to = (T*)out.data + p;
          if (terms[0].minus.data) combine_untiled<T, K, true>(terms.data(), n, from, to, streaming, p);
          else combine_untiled<T, K, false>(terms.data(), n, from, to, streaming, p);
        });
      });
      continue;
    }
    const int64_t whole = n / 64 * 64;
    if (base.data) load_as_double<false>(base, p, n, total);
    else std::fill_n(total, n, 0.0);
    for (int64_t j = 0, taken; j < count; j += taken) {
      const Term* term = &terms[j];
      taken = count_uniform(term, std::min<int64_t>(count - j, ROWS_PER_PASS));
      int64_t done = 0;
      if (taken) {
        done = whole;
        dispatch_dtype(term->plus.dtype, [&]<class T>() {
          dispatch_count<ROWS_PER_PASS>(taken, [&]<int K>() {
            if (term->minus.data) add_rows<T, K, true>(term, p, whole, total);
            else add_rows<T, K, false>(term, p, whole, total);
          });
        });
      }
      taken = std::max<int64_t>(taken, 1);
      if (done == n) continue;
      for (int64_t r = 0; r < taken; r++) {
        load_as_double<false>(term[r].plus, p + done, n - done, line);
        if (term[r].minus.data) load_as_double<true>(term[r].minus, p + done, n - done, line);
        for (int64_t i = 0; i < n - done; i++) total[done + i] = __builtin_fma(term[r].c, line[i], total[done + i]);
      }
    }
    round_tile(total, p, n, out, streaming && ((uintptr_t)out.data + p * size) % 64 == 0);
  }
}

// Collect the terms of a piece. A row whose coefficient is 0 is not read, so that a NaN in it has no effect.
void gather_terms(int64_t k, int64_t count, int64_t piece, const Vec* plus, const Vec* minus, const double* coefficients,
             std::vector<Term>& terms) {
  terms.clear();
  for (int64_t j = 0; j < k; j++)
    if (coefficients[j] != 0) terms.push_back({plus[j * count + piece], minus[j * count + piece], coefficients[j]});
}

// One of several linear combinations that are computed together. The flags are:
// - per_segment: each segment has its own coefficients.
// - deferred: a later combination reads the target, so the result is written after all combinations of a tile.
// - streaming: the result bypasses the cache.
struct LinearCombination {
  int64_t k, per_segment, deferred, streaming;
  const Vec *plus, *minus, *base, *out;
  const double* coefficients;
};
constexpr int COMBINE_TILE = 1 << 10;  // entries of all rows that stay in the cache for all combinations

// Compute all combinations for the entries p..stop of one piece.
void combine_many(const LinearCombination* goal, std::vector<std::vector<Term>>& terms, int64_t piece, int64_t p, int64_t stop) {
  static thread_local std::vector<double> scratch;  // of the widest dtype
  const int64_t goals = terms.size();
  scratch.resize(goals * COMBINE_TILE);
  for (int64_t n; p < stop; p += n) {
    n = std::min<int64_t>(COMBINE_TILE, stop - p);
    for (int64_t g = 0; g < goals; g++) {
      Vec out = goal[g].out[piece];
      const bool apart = goal[g].deferred;
      if (apart) out.data = (char*)((uintptr_t)(scratch.data() + g * COMBINE_TILE) - p * ITEM_SIZES[out.dtype]);
      combine_run(goal[g].base[piece], terms[g], p, p + n, out, goal[g].streaming && !apart);
    }
    for (int64_t g = 0; g < goals; g++) {
      const Vec& out = goal[g].out[piece];
      const int64_t size = ITEM_SIZES[out.dtype];
      if (goal[g].deferred) std::memcpy(out.data + p * size, scratch.data() + g * COMBINE_TILE, n * size);
    }
  }
}

// Streaming stores are weakly ordered. The fence makes them visible before another thread is notified.
void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// ---- threads

// Run `work` on every block, with up to `threads` threads. Return false if memory is exhausted.
template <class Work> bool parallel_for_blocks(int64_t blocks, int64_t threads, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    int64_t finished = 0;
    std::mutex lock;
    std::condition_variable all;
  };
  // The shared state outlives the call, because on a busy machine a thread may start after all blocks are done. Such a
  // thread finds no block, and the call does not wait for it. Threads access the caller's data only while there are
  // blocks.
  const auto shared = std::make_shared<Shared>();
  auto run = [shared, blocks, &work] {
    int64_t mine = 0;
    for (int64_t b; (b = shared->next++) < blocks; mine++) try {
        work(b);
      } catch (const std::bad_alloc&) {  // an uncaught exception would terminate the process
        shared->failed = true;
      }
    if (mine == 0) return;
    std::lock_guard guard(shared->lock);
    if ((shared->finished += mine) == blocks) shared->all.notify_one();
  };
  try {
    for (int64_t t = 1; t < std::min(threads, blocks); t++) std::thread(run).detach();
  } catch (const std::exception&) {  // no further threads available: continue with the existing ones
  }
  run();
  std::unique_lock guard(shared->lock);
  shared->all.wait(guard, [&] { return shared->finished == blocks; });
  return !shared->failed;
}

// Add the pair (other_high, other_low) to (high, low), as reduction.two_sum does. The rounding error of high is added
// to low (Knuth 1969).
void add_exactly(double& high, double& low, double other_high, double other_low) {
  const double sum = high + other_high, part = sum - high;
  const double error = ((high - (sum - part)) + (other_high - part)) + (low + other_low);
  const double total = sum + error;
  const bool finite = std::isfinite(total);
  low = finite ? error - (total - sum) : 0.0;
  high = finite ? total : sum;
}

// Compute the products of the rows over every block. After blocks [first, last), call next(first, last) in the same
// thread, while their entries are in the cache.
template <class Next>
bool gram_blocks(const Operands& rows, int64_t blocks, const Block* table, double* sums, int64_t threads, const Next& next) {
  const int64_t k = rows.k;
  const EvenSplit groups(k, MAX_ROWS);
  bool done = false, few = false;
  if (k <= MAX_SINGLE_PANEL)
    dispatch_count<MAX_SINGLE_PANEL>(k, [&]<int M>() {
      constexpr int B = interleaved_blocks<M>();
      // Process whole groups if there are enough for all threads, then the remaining blocks.
      if constexpr (B > 1)
        if ((few = blocks >= B * threads)) {
          const int64_t whole = blocks / B, left = blocks % B;
          done = parallel_for_blocks(whole + left, threads, [&](int64_t g) {
            const bool group = g < whole;
            const int64_t b = group ? g * B : blocks - left + (g - whole);
            double* to = sums + b * (M * (M + 1) / 2);
            group ? interleaved_products<M, B>(rows, table + b, to) : block_products(rows, table[b], 0, M, 0, M, to);
            next(b, group ? b + B : b + 1);
          });
        }
    });
  if (few) return done;
  return parallel_for_blocks(blocks, threads, [&](int64_t b) {
    double* to = sums + b * (k * (k + 1) / 2);
    for (int64_t g = 0; g < groups.count; g++)
      for (int64_t h = 0; h <= g; h++) {
        const int64_t i = groups.edge(g), j = groups.edge(h);
        block_products(rows, table[b], i, groups.edge(g + 1) - i, j, groups.edge(h + 1) - j, to);
      }
    next(b, b + 1);
  });
}

}  // namespace

// A row has one descriptor per piece, and the descriptors of a row are adjacent. The same holds for `minus`, and for
// `base`, which is one row. A missing operand has null data in every piece. The edges run from 0 to P.
extern "C" {

bool manifoldagg_gram(int64_t k, int64_t count, const int64_t* edges, const Vec* plus, const Vec* minus,
                      int64_t blocks, const Block* table, double* sums, int64_t threads) {
  return gram_blocks({k, {count, edges}, plus, minus}, blocks, table, sums, threads, [](int64_t, int64_t) {});
}

bool manifoldagg_combine(int64_t k, int64_t count, const int64_t* edges, const Vec* plus, const Vec* minus,
                         const Vec* base, const Vec* out, const double* coefficients, int64_t blocks,
                         const Block* table, bool stream, int64_t threads) {
  return parallel_for_blocks(blocks, threads, [&](int64_t b) {
    static thread_local std::vector<Term> terms;
    Pieces{count, edges}.for_each_piece(table[b].start, table[b].stop, [&](int64_t piece, int64_t start, int64_t stop) {
      gather_terms(k, count, piece, plus, minus, coefficients + table[b].segment * k, terms);
      combine_run(base[piece], terms, start - edges[piece], stop - edges[piece], out[piece], stream);
    });
    fence();
  });
}

// Compute several linear combinations of rows in the same pieces, from the values before the first write.
bool manifoldagg_combine_many(int64_t goals, const LinearCombination* goal, int64_t count, const int64_t* edges, int64_t blocks,
                              const Block* table, int64_t threads) {
  return parallel_for_blocks(blocks, threads, [&](int64_t b) {
    static thread_local std::vector<std::vector<Term>> terms;
    terms.resize(goals);
    Pieces{count, edges}.for_each_piece(table[b].start, table[b].stop, [&](int64_t piece, int64_t start, int64_t stop) {
      for (int64_t g = 0; g < goals; g++) {
        const LinearCombination& one = goal[g];
        const double* line = one.coefficients + (one.per_segment ? table[b].segment * one.k : 0);
        gather_terms(one.k, count, piece, one.plus, one.minus, line, terms[g]);
      }
      combine_many(goal, terms, piece, start - edges[piece], stop - edges[piece]);
    });
    fence();
  });
}

// Add the `width` sums of each block over the blocks of each segment, into `to`. Pairs of neighbours are added level by
// level, with the same bits as `reduction.pairwise_sum`. Overwrites `sums`.
void manifoldagg_pairwise_sum(int64_t width, int64_t blocks, const Block* table, double* sums, double* to) {
  std::vector<double> errors(blocks * width, 0.0);
  for (int64_t first = 0, last; first < blocks; first = last) {
    for (last = first; last < blocks && table[last].segment == table[first].segment;) last++;
    for (int64_t step = 1; step < last - first; step *= 2)
      for (int64_t b = first; b + step < last; b += 2 * step)
        for (int64_t i = b * width; i < (b + 1) * width; i++) add_exactly(sums[i], errors[i], sums[i + step * width], errors[i + step * width]);
    std::copy_n(sums + first * width, width, to + table[first].segment * width);
  }
}

// Compute the products of rows and linear combinations of rows in the same pieces. Each row is read once from memory.
// Targets must not share memory with rows.
bool manifoldagg_gram_combine(int64_t k, int64_t count, const int64_t* edges, const Vec* plus, const Vec* minus,
                              int64_t blocks, const Block* table, double* sums, int64_t threads, int64_t goals,
                              const LinearCombination* goal) {
  const Pieces pieces{count, edges};
  return gram_blocks({k, pieces, plus, minus}, blocks, table, sums, threads, [&](int64_t first, int64_t last) {
    static thread_local std::vector<Term> terms;
    pieces.for_each_piece(table[first].start, table[last - 1].stop, [&](int64_t piece, int64_t start, int64_t stop) {
      for (int64_t g = 0; g < goals; g++) {
        const LinearCombination& one = goal[g];
        gather_terms(one.k, count, piece, one.plus, one.minus, one.coefficients, terms);
        combine_run(one.base[piece], terms, start - edges[piece], stop - edges[piece], one.out[piece], one.streaming);
      }
    });
    fence();
  });
}

}
