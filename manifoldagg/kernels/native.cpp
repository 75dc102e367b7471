// The two kernels on the host: each row is read once, differences and sums stay in float64 registers.
//
// A block (blocks.py) is summed in four lanes and the lanes in a fixed order, so it does not matter which thread took
// it. Results go past the cache where that is asked for: a target that is not read needs no line of it.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 4;    // entries at a time
constexpr int TILE = 256;   // entries of a row that the general path widens
constexpr int AHEAD = 256;  // entries by which the fast path prefetches
typedef double V __attribute__((vector_size(32)));
typedef float F __attribute__((vector_size(16)));
typedef uint32_t I __attribute__((vector_size(16)));
typedef uint16_t H __attribute__((vector_size(8)));

// The upper half of a float. Rounded by way of float, as torch does: to nearest, ties to even, by adding half of what is
// cut off less one, and one more where the last bit that stays is odd. A NaN could carry over into an infinity.
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
  // By way of float, as torch does: straight from double ties can fall otherwise.
  explicit f16(double x) : value(_Float16(float(x))) {}
};

struct Vec { char* data; int64_t stride, dtype; };  // strides in entries; dtype: 0 f32, 1 f64, 2 bf16, 3 f16
struct Rows { int64_t k; const Vec *plus, *minus; };  // minus[i].data is null where nothing is subtracted
struct Block { int64_t start, stop, segment; };

// Where the tensors of a row are joined: piece i has the entries from edges[i] on, and its description for row j is
// at j * count + i.
struct Pieces {
  int64_t count;
  const int64_t* edges;
  // Calls work(piece, start, stop) for each part of [start, stop) that lies in one piece, in order.
  template <class Work> void runs(int64_t start, int64_t stop, Work work) const {
    for (int64_t i = std::upper_bound(edges, edges + count, start) - edges - 1; start < stop; i++) {
      const int64_t end = std::min(stop, edges[i + 1]);
      if (start < end) work(i, start, end);
      start = std::max(start, end);
    }
  }
};

constexpr int64_t BYTES[] = {4, 8, 2, 2};

// A piece, as if the vector that it is part of began where this one says entry 0 is.
Vec from_zero(Vec x, int64_t edge) {
  if (x.data) x.data -= edge * x.stride * BYTES[x.dtype];
  return x;
}

// The rows of one piece.
struct Part {
  std::vector<Vec> plus, minus;
  void add(const Vec& row, const Vec& less, int64_t edge) {
    plus.push_back(from_zero(row, edge));
    minus.push_back(from_zero(less, edge));
  }
  Rows rows() const { return {int64_t(plus.size()), plus.data(), minus.data()}; }
};

// Written out where the processor has it in one instruction: compilers make four of a converted vector.
V wide(F f) {
#if defined(__AVX__)
  return (V)_mm256_cvtps_pd((__m128)f);
#else
  return __builtin_convertvector(f, V);
#endif
}
F narrow(V v) {
#if defined(__AVX__)
  return (F)_mm256_cvtpd_ps((__m256d)v);
#else
  return __builtin_convertvector(v, F);
#endif
}

template <class T> V load(const T* p) { return V{double(p[0]), double(p[1]), double(p[2]), double(p[3])}; }
// memcpy: addresses need not be multiples of a vector's size.
template <> V load(const float* p) { F f; std::memcpy(&f, p, 16); return wide(f); }
#if defined(__AVX2__)
template <> V load(const bf16* p) {
  return wide((F)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p)), 16));
}
#endif
#if defined(__F16C__)
template <> V load(const f16* p) { return wide((F)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p))); }
#endif
template <> V load(const double* p) { V v; std::memcpy(&v, p, 32); return v; }

// `stream`: past the cache, for a target that nobody reads soon. Its address must be a multiple of the size stored.
template <class T> void store(T* p, V v, bool) { for (int l = 0; l < LANES; l++) p[l] = T(v[l]); }
template <> void store(float* p, V v, bool stream) {
  const F f = narrow(v);
#if defined(__x86_64__)
  if (stream) return _mm_stream_ps(p, (__m128)f);
#endif
  std::memcpy(p, &f, 16);
}
template <> void store(double* p, V v, bool stream) {
#if defined(__AVX__)
  if (stream) return _mm256_stream_pd(p, (__m256d)v);
#endif
  std::memcpy(p, &v, 32);
}

void store(H h, void* p, bool stream) {
#if defined(__x86_64__)
  if (stream) return _mm_stream_si64((long long*)p, (long long)h);
#endif
  std::memcpy(p, &h, sizeof h);
}
template <> void store(bf16* p, V v, bool stream) {
  const F f = narrow(v);
  // The rounding of struct bf16, four at a time.
  const I u = (I)f, nearest = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  store(__builtin_convertvector(f == f ? nearest : I{} + 0x7fc0, H), p, stream);
}
#if defined(__F16C__)
template <> void store(f16* p, V v, bool stream) {
  store((H)_mm_cvtsi128_si64(_mm_cvtps_ph((__m128)narrow(v), _MM_FROUND_TO_NEAREST_INT)), p, stream);
}
#endif

// The first n < LANES entries, zeros after them.
template <class T> V load(const T* p, int64_t n) {
  V v{};
  for (int64_t l = 0; l < n; l++) v[l] = double(p[l]);
  return v;
}

// a * b + c, rounded once, on every processor: fma of the C library is slow without the instruction, and gives its bits.
V fma(V a, V b, V c) {
#if defined(__FMA__)
  return (V)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  for (int l = 0; l < LANES; l++) c[l] = __builtin_fma(a[l], b[l], c[l]);
  return c;
#endif
}

// Entries of a vector, whatever its dtype and stride.
template <class T> void widen(const Vec& x, int64_t p, int64_t n, double* to) {
  // Stride 1 apart, so that the compiler makes vectors of it.
  const T* from = (const T*)x.data + p * x.stride;
  if (x.stride == 1) for (int64_t i = 0; i < n; i++) to[i] = double(from[i]);
  else for (int64_t i = 0; i < n; i++) to[i] = double(from[i * x.stride]);
}
void widen(const Vec& x, int64_t p, int64_t n, double* to) {
  switch (x.dtype) {
    case 0: return widen<float>(x, p, n, to);
    case 1: return widen<double>(x, p, n, to);
    case 2: return widen<bf16>(x, p, n, to);
    default: return widen<f16>(x, p, n, to);
  }
}
void difference(const Vec& plus, const Vec& minus, int64_t p, int64_t n, double* to, double* scratch) {
  widen(plus, p, n, to);
  if (minus.data == nullptr) return;
  widen(minus, p, n, scratch);
  for (int64_t l = 0; l < n; l++) to[l] -= scratch[l];
}

// The fast path: K rows of one dtype and stride 1, from all of which one vector is subtracted, or none.
template <class T, int K, bool M> struct Reader {
  const T *plus[K], *minus;
  explicit Reader(const Rows& rows) : minus((const T*)rows.minus[0].data) {
    for (int i = 0; i < K; i++) plus[i] = (const T*)rows.plus[i].data;
  }
  template <class Load> void read(Load load, V* r) const {
    const V b = M ? load(minus) : V{};
    for (int i = 0; i < K; i++) r[i] = M ? load(plus[i]) - b : load(plus[i]);
  }
  void operator()(int64_t p, V* r) const {
    read([p](const T* x) { __builtin_prefetch(x + p + AHEAD); return load(x + p); }, r);
  }
  void operator()(int64_t p, int64_t n, V* r) const { read([=](const T* x) { return load(x + p, n); }, r); }
};

// The order is fixed: sums depend on the block alone.
double lanes(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }

// Apart from its callers, whose exceptions would keep the sums out of registers.
template <class T, int K, bool M> __attribute__((noinline)) void gram_fused(const Rows& rows, Block b, double* sums) {
  const Reader<T, K, M> read(rows);
  // K <= 4, so at most ten sums and four rows: they fit the sixteen registers of AVX.
  V total[K * (K + 1) / 2] = {}, r[K];
  int64_t p = b.start;
  auto add = [&] { for (int i = 0, n = 0; i < K; i++) for (int j = 0; j <= i; j++, n++) total[n] = fma(r[i], r[j], total[n]); };
  for (; p + LANES <= b.stop; p += LANES) { read(p, r); add(); }
  if (p < b.stop) { read(p, b.stop - p, r); add(); }
  for (int n = 0; n < K * (K + 1) / 2; n++) sums[n] = lanes(total[n]);
}

void gram_general(int64_t k, const Pieces& pieces, const Vec* plus, const Vec* minus, Block b, double* sums) {
  // Kept from block to block, so that a thread asks for memory once.
  static thread_local std::vector<V> tile, total;
  const int64_t width = TILE / LANES;
  tile.assign((k + 1) * width, V{});
  total.assign(k * (k + 1) / 2, V{});
  for (int64_t p = b.start; p < b.stop; p += TILE) {
    const int64_t n = std::min<int64_t>(TILE, b.stop - p);
    // Zeros behind the last entry, not those of the tile before, so that whole vectors can be summed.
    if (n < TILE) std::fill(tile.begin(), tile.end(), V{});
    pieces.runs(p, p + n, [&](int64_t piece, int64_t start, int64_t stop) {
      for (int64_t i = 0; i < k; i++) {
        const Vec row = plus[i * pieces.count + piece], less = minus[i * pieces.count + piece];
        const int64_t from = start - pieces.edges[piece];
        difference(row, less, from, stop - start, (double*)&tile[i * width] + (start - p), (double*)&tile[k * width]);
      }
    });
    for (int64_t i = 0, m = 0; i < k; i++)
      for (int64_t j = 0; j <= i; j++, m++) {
        V sum = total[m];
        for (int64_t l = 0; l < width; l++) sum = fma(tile[i * width + l], tile[j * width + l], sum);
        total[m] = sum;
      }
  }
  for (size_t m = 0; m < total.size(); m++) sums[m] = lanes(total[m]);
}

template <class T, int K, bool M>
__attribute__((noinline)) void combine_fused(const Vec& base, const Rows& rows, const double* c, Block b, const Vec& out, bool stream) {
  const Reader<T, K, M> read(rows);
  T* const to = (T*)out.data;
  const T* const from = (const T*)base.data;
  V factor[K];
  for (int j = 0; j < K; j++) factor[j] = V{} + c[j];
  auto sum = [&](V total, const V* r) { for (int j = 0; j < K; j++) total = fma(factor[j], r[j], total); return total; };
  auto part = [&](int64_t p, int64_t n) {
    V r[K];
    read(p, n, r);
    const V total = sum(from ? load(from + p, n) : V{}, r);
    for (int64_t l = 0; l < n; l++) to[p + l] = T(total[l]);
  };
  int64_t p = b.start;
  // Streaming stores trap on addresses that are no multiple of a vector: entries before the first one go one by one.
  if (stream)
    if (int64_t off = ((uintptr_t)(to + p) % sizeof(V)) / sizeof(T) % LANES) {
      const int64_t n = std::min(LANES - off, b.stop - p);
      part(p, n);
      p += n;
    }
  auto whole = [&](auto past, auto start) {
    for (; p + LANES <= b.stop; p += LANES) {
      V r[K];
      read(p, r);
      store(to + p, sum(start ? load(from + p) : V{}, r), past);
    }
  };
  // As types, not as values: four loops without a question inside.
  using yes = std::true_type;
  using no = std::false_type;
  if (stream) from ? whole(yes{}, yes{}) : whole(yes{}, no{});
  else from ? whole(no{}, yes{}) : whole(no{}, no{});
  if (p < b.stop) part(p, b.stop - p);
}

template <class T> void narrow(const double* from, int64_t n, const Vec& out, int64_t p) {
  for (int64_t l = 0; l < n; l++) ((T*)out.data)[(p + l) * out.stride] = T(from[l]);
}
void combine_general(const Vec& base, const Rows& rows, const double* c, Block b, const Vec& out) {
  double total[TILE], row[TILE], scratch[TILE];
  for (int64_t p = b.start; p < b.stop; p += TILE) {
    const int64_t n = std::min<int64_t>(TILE, b.stop - p);
    if (base.data) widen(base, p, n, total);
    else std::fill_n(total, n, 0.0);
    // Row by row, in their order, with one rounding each: the bits of the fast path.
    for (int64_t j = 0; j < rows.k; j++) {
      difference(rows.plus[j], rows.minus[j], p, n, row, scratch);
      for (int64_t l = 0; l < n; l++) total[l] = __builtin_fma(c[j], row[l], total[l]);
    }
    switch (out.dtype) {
      case 0: narrow<float>(total, n, out, p); break;
      case 1: narrow<double>(total, n, out, p); break;
      case 2: narrow<bf16>(total, n, out, p); break;
      default: narrow<f16>(total, n, out, p);
    }
  }
}

// Calls call.operator()<T, K, M>() for rows that the fast path takes; false for others.
template <class T, bool M, class Call> bool by_count(int64_t k, Call call) {
  switch (k) {
    case 1: call.template operator()<T, 1, M>(); return true;
    case 2: call.template operator()<T, 2, M>(); return true;
    case 3: call.template operator()<T, 3, M>(); return true;
    case 4: call.template operator()<T, 4, M>(); return true;
    default: return false;
  }
}
template <class T, class Call> bool by_minus(const Rows& rows, Call call) {
  return rows.minus[0].data ? by_count<T, true>(rows.k, call) : by_count<T, false>(rows.k, call);
}
template <class Call> bool fused(const Rows& rows, Call call, std::initializer_list<const Vec*> others = {}) {
  if (rows.k == 0) return false;
  const int64_t dtype = rows.plus[0].dtype;
  auto fits = [&](const Vec& x) { return x.data == nullptr || (x.dtype == dtype && x.stride == 1); };
  for (int64_t i = 0; i < rows.k; i++)
    if (!fits(rows.plus[i]) || !fits(rows.minus[i]) || rows.minus[i].data != rows.minus[0].data) return false;
  for (const Vec* x : others) if (!fits(*x)) return false;
  switch (dtype) {
    case 0: return by_minus<float>(rows, call);
    case 1: return by_minus<double>(rows, call);
    case 2: return by_minus<bf16>(rows, call);
    default: return by_minus<f16>(rows, call);
  }
}

// Work on every block, by as many threads as can be had; false where memory ran out.
template <class Work> bool each(int64_t blocks, int64_t threads, Work work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> done{true};
  // An exception that leaves a thread would end the process.
  auto run = [&] {
    try {
      for (int64_t b; (b = next++) < blocks;) work(b);
    } catch (const std::bad_alloc&) {
      done = false;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int64_t t = 1; t < std::min(threads, blocks); t++) others.emplace_back(run);
  } catch (const std::exception&) {  // no more threads to be had: those there are, and this one, do the work
  }
  run();
  for (auto& other : others) other.join();
  return done;
}

}  // namespace

// A row is described piece by piece; row i's pieces lie together. `minus` likewise, and `base` for one row: data null in
// every piece where there is none. The edges go from 0 to P.
extern "C" {

bool manifoldagg_gram(int64_t k, int64_t count, const int64_t* edges, const Vec* plus, const Vec* minus,
                      int64_t blocks, const Block* table, double* sums, int64_t threads) {
  const Pieces pieces{count, edges};
  return each(blocks, threads, [&](int64_t b) {
    const Block& block = table[b];
    double* to = sums + b * (k * (k + 1) / 2);
    bool done = false;
    pieces.runs(block.start, block.stop, [&](int64_t piece, int64_t start, int64_t stop) {
      if (start != block.start || stop != block.stop) return;
      Part part;
      for (int64_t i = 0; i < k; i++) part.add(plus[i * count + piece], minus[i * count + piece], edges[piece]);
      const Rows rows = part.rows();
      auto fast = [&]<class T, int K, bool M>() { gram_fused<T, K, M>(rows, block, to); };
      done = fused(rows, fast);
    });
    if (!done) gram_general(k, pieces, plus, minus, block, to);
  });
}

bool manifoldagg_combine(int64_t k, int64_t count, const int64_t* edges, const Vec* plus, const Vec* minus,
                         const Vec* base, const Vec* out, const double* coefficients, int64_t blocks,
                         const Block* table, bool stream, int64_t threads) {
  const Pieces pieces{count, edges};
  return each(blocks, threads, [&](int64_t b) {
    pieces.runs(table[b].start, table[b].stop, [&](int64_t piece, int64_t start, int64_t stop) {
      const Block run{start, stop, table[b].segment};
      const int64_t edge = edges[piece];
      Part part;
      // A row whose coefficient is 0 is not read: a NaN in it must not show.
      std::vector<double> c;
      for (int64_t j = 0; j < k; j++)
        if (const double x = coefficients[run.segment * k + j]; x != 0) {
          part.add(plus[j * count + piece], minus[j * count + piece], edge);
          c.push_back(x);
        }
      const Rows rows = part.rows();
      const Vec first = from_zero(base[piece], edge), to = from_zero(out[piece], edge);
      // An address between two entries' multiples never meets a vector's.
      const bool past = stream && (uintptr_t)to.data % BYTES[to.dtype] == 0;
      auto fast = [&]<class T, int K, bool M>() { combine_fused<T, K, M>(first, rows, c.data(), run, to, past); };
      if (!fused(rows, fast, {&first, &to})) combine_general(first, rows, c.data(), run, to);
    });
#if defined(__x86_64__)
    // Streaming stores are weakly ordered: they have to be there before another thread is told that the work is done.
    _mm_sfence();
#endif
  });
}

}
