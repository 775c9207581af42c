/* The CPU's share of entropy.py: the loops of kernels.py, one row after another, in blocks that stay in the cache.

   A row x is read once for the triple  m = max x,  s = sum e^d,  w = sum e^d d,  where d = (x - m) scale, and once more for its
   gradient. A target of NOT_HERE lies in another shard; a row without a target (NO_ROW) is skipped. Compiled once for
   each type of logits, with TYPE, LOAD and STORE set; all arithmetic is in fp32. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { NOT_HERE = -1, NO_ROW = -2, BLOCK = 1024, AHEAD = 2 * BLOCK, LINE = 64 / sizeof(TYPE) };
#define LEAST -87.0f /* e^LEAST is the smallest normal number: nothing beside the largest term, which is 1 */

static inline float from_bits(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline uint32_t to_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline float load_bf16(uint16_t value) { return from_bits((uint32_t)value << 16); }
static inline uint16_t store_bf16(float value) { /* rounds to the nearest, ties to even */
    uint32_t bits = to_bits(value);
    return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Zeros past the cache, where the machine can: memory that is only written need not be read first. */
static void write_zeros(char *to, size_t bytes) {
#ifdef __SSE2__
    while (bytes && (uintptr_t)to % 16) *to++ = 0, bytes--;
    for (; bytes >= 16; to += 16, bytes -= 16) _mm_stream_si128((__m128i *)to, _mm_setzero_si128());
    _mm_sfence();
#endif
    memset(to, 0, bytes);
}

/* The larger one, and NaN if value is NaN. */
static inline float at_least(float least, float value) { return value < least ? least : value; }

/* 2^y for -126 <= y <= 0, or NaN: y = k + f with |f| <= 1/2, and a polynomial for 2^f, wrong by less than 2e-7. */
static inline float power_of_two(float y) {
    float k = rintf(y), f = y - k;
    float p = fmaf(1.5403530e-4f, f, 1.3333558e-3f);
    p = fmaf(p, f, 9.6181291e-3f);
    p = fmaf(p, f, 5.5504109e-2f);
    p = fmaf(p, f, 2.4022651e-1f);
    p = fmaf(p, f, 6.9314718e-1f);
    return fmaf(p, f, 1.0f) * from_bits((uint32_t)((int32_t)k + 127) << 23);
}
#define LOG2_E 1.44269504f

/* Several threads run the same call: each takes the next row until none is left. */
#define FOR_EACH_ROW for (int64_t row; (row = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < rows;)

/* out is [4, rows]: m, s, w and the target's logit. */
void forward(const TYPE *x, int64_t stride, const int64_t *target, float *out, int64_t rows, int64_t columns, float scale,
             int64_t *next) {
    float z[BLOCK];
    FOR_EACH_ROW {
        if (target[row] == NO_ROW) continue;
        const TYPE *mine = x + row * stride;
        float m = -INFINITY, s = 0, w = 0;
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int n = columns - start < BLOCK ? (int)(columns - start) : BLOCK;
            float top = m, sum = 0, weighted = 0;
            for (int j = 0; j < n; j += LINE) __builtin_prefetch(mine + start + j + AHEAD);
#pragma omp simd reduction(max : top)
            for (int j = 0; j < n; j++) {
                z[j] = LOAD(mine[start + j]);
                top = z[j] > top ? z[j] : top;
            }
            if (top == -INFINITY) { /* so far nothing but -inf, which adds nothing, or NaN */
                for (int j = 0; j < n; j++) s = z[j] != z[j] ? NAN : s;
                continue;
            }
            if (top > m) { /* move what we have to the new maximum */
                float d = (m - top) * scale, e = expf(d);
                w = s == 0 ? 0 : e * (w + d * s);
                s *= e;
                m = top;
            }
#pragma omp simd reduction(+ : sum, weighted)
            for (int j = 0; j < n; j++) {
                float d = at_least(LEAST, (z[j] - m) * scale), e = power_of_two(d * LOG2_E);
                sum += e;
                weighted += e * d;
            }
            s += sum;
            w += weighted;
        }
        out[row] = m;
        out[rows + row] = s;
        out[2 * rows + row] = w;
        out[3 * rows + row] = target[row] >= 0 ? LOAD(mine[target[row]]) : 0;
    }
}

/* constants is [5, rows]: m, log s, entropy, and the incoming gradients of log-prob and entropy. gradient may be x.
   A row gone bad has an entropy of NaN, which makes each of its gradients NaN. */
void backward(const TYPE *x, int64_t stride, const int64_t *target, TYPE *gradient, int64_t gradient_stride,
              const float *constants, int64_t rows, int64_t columns, float scale, int64_t *next) {
    FOR_EACH_ROW {
        const TYPE *mine = x + row * stride;
        TYPE *theirs = gradient + row * gradient_stride;
        if (target[row] == NO_ROW) {
            write_zeros((char *)theirs, (size_t)columns * sizeof(TYPE));
            continue;
        }
        float m = constants[row], log_s = constants[rows + row], entropy = constants[2 * rows + row];
        float of_log_prob = constants[3 * rows + row] * scale, of_entropy = constants[4 * rows + row] * scale;
        float least = log_s + LEAST, shift = -log_s * LOG2_E, fixed = of_log_prob + of_entropy * (entropy - log_s);
        float logit = target[row] >= 0 ? LOAD(mine[target[row]]) : 0;
        for (int64_t start = 0; start < columns; start += BLOCK) {
            int64_t stop = start + BLOCK < columns ? start + BLOCK : columns;
            for (int64_t j = start; j < stop; j += LINE) {
                __builtin_prefetch(mine + j + AHEAD);
                __builtin_prefetch(theirs + j + AHEAD, 1);
            }
#pragma omp simd
            for (int64_t j = start; j < stop; j++) { /* d = (x - m) scale, p = e^(d - log s), -p (g_lp + g_H (log p + H)) */
                float raw = (LOAD(mine[j]) - m) * scale, d = raw > least ? raw : least;
                float p = raw > least ? power_of_two(d * LOG2_E + shift) : 0;
                theirs[j] = STORE(-p * (fixed + of_entropy * d));
            }
        }
        if (target[row] >= 0) { /* once more, with the one of the target, and rounded once */
            float raw = (logit - m) * scale, d = raw > least ? raw : least, p = raw > least ? expf(d - log_s) : 0;
            theirs[target[row]] = STORE(of_log_prob - p * (fixed + of_entropy * d));
        }
    }
}
