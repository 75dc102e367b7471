// The floor of work on a model: k vectors are read and nothing kept; k are read and one is written. And how fast the
// processor multiplies and adds float64 numbers that it holds in registers.
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace {

typedef float F __attribute__((vector_size(32), aligned(4)));
constexpr int LANES = sizeof(F) / sizeof(float);
constexpr int WIDTH = 4 * LANES;  // entries of a vector between one and the next: whole lines of the cache
constexpr int AHEAD = 256;        // entries by which the processor is told
constexpr int MOST = 33;   // vectors

template <class Work> void split(int64_t size, int64_t threads, Work work) {
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; t++) others.emplace_back(work, t, size * t / threads, size * (t + 1) / threads);
  work(0, 0, size / threads);
  for (auto& other : others) other.join();
}

template <int K> inline __attribute__((always_inline)) void add(const float* const* from, int64_t p, F* lanes) {
  for (int i = 0; i < K; i++) {
    __builtin_prefetch(from[i] + p + AHEAD);
    __builtin_prefetch(from[i] + p + AHEAD + WIDTH / 2);
    for (int l = 0; l < 4; l++) lanes[l] += *(const F*)(from[i] + p + l * LANES);
  }
}

template <int K> float read(const float* const* from, int64_t size, int64_t threads) {
  std::vector<float> sums(threads);
  split(size, threads, [&](int64_t t, int64_t low, int64_t high) {
    F lanes[4] = {};
    float sum = 0;
    int64_t p = low;
    for (; p + WIDTH <= high; p += WIDTH) add<K>(from, p, lanes);
    for (; p < high; p++)
      for (int i = 0; i < K; i++) sum += from[i][p];
    for (F lane : lanes)
      for (int l = 0; l < LANES; l++) sum += lane[l];
    sums[t] = sum;
  });
  float total = 0;
  for (float sum : sums) total += sum;
  return total;
}

template <int K> void read_write(const float* const* from, float* out, int64_t size, int64_t threads) {
  split(size, threads, [=](int64_t, int64_t low, int64_t high) {
    int64_t p = low;
    for (; p + WIDTH <= high; p += WIDTH) {
      F lanes[4] = {};
      add<K>(from, p, lanes);
      for (int l = 0; l < 4; l++) *(F*)(out + p + l * LANES) = lanes[l];
    }
    for (; p < high; p++) {
      float sum = 0;
      for (int i = 0; i < K; i++) sum += from[i][p];
      out[p] = sum;
    }
  });
}

using Read = float (*)(const float* const*, int64_t, int64_t);
using ReadWrite = void (*)(const float* const*, float*, int64_t, int64_t);
template <int... K> Read reads(int64_t k, std::integer_sequence<int, K...>) {
  static const Read all[] = {read<K>...};
  return all[k];
}
template <int... K> ReadWrite writes(int64_t k, std::integer_sequence<int, K...>) {
  static const ReadWrite all[] = {read_write<K>...};
  return all[k];
}

}  // namespace

extern "C" {

float streams_read(int64_t k, const float* const* from, int64_t size, int64_t threads) {
  return reads(k, std::make_integer_sequence<int, MOST>())(from, size, threads);
}

void streams_read_write(int64_t k, const float* const* from, float* out, int64_t size, int64_t threads) {
  writes(k, std::make_integer_sequence<int, MOST>())(from, out, size, threads);
}

// So many multiplications with an addition on each thread.
double streams_multiply_add(int64_t count, int64_t threads) {
#if defined(__AVX512F__)
  typedef double D __attribute__((vector_size(64)));
#else
  typedef double D __attribute__((vector_size(32)));
#endif
  constexpr int CHAINS = 12;  // at once: they hide the latency of each and fit the registers
  std::vector<double> sums(threads);
  split(threads, threads, [&](int64_t t, int64_t, int64_t) {
    D chain[CHAINS];
    for (int i = 0; i < CHAINS; i++) chain[i] = D{} + double(i);
    const D factor = D{} + 0.999;
    for (int64_t n = 0; n < count; n += CHAINS * int64_t(sizeof(D) / sizeof(double)))
      for (int i = 0; i < CHAINS; i++) chain[i] = chain[i] * factor + factor;
    double sum = 0;
    for (D each : chain) sum += each[0];
    sums[t] = sum;
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

}
