/* Conversions between dtypes, in C and in the kernels. */
#include "testing.h"

static void check_conversions(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        const uint32_t exponent = h >> 10 & 31, fraction = h & 1023;
        const double size = exponent ? ldexp(1024 + fraction, (int)exponent - 25) : ldexp(fraction, -24);
        const float f16 = rope_f16_to_f32((uint16_t)h), bf16 = rope_bf16_to_f32((uint16_t)h);
        if (exponent < 31)
            CHECK((double)f16 == (h & 0x8000 ? -size : size), "%x", h);
        else
            CHECK(fraction ? isnan(f16) : isinf(f16) && !signbit(f16) == !(h & 0x8000), "%x", h);
        CHECK(isnan(f16) ? isnan(rope_f16_to_f32(rope_f32_to_f16(f16))) : rope_f32_to_f16(f16) == h, "%x", h);
        CHECK(rope_f32_to_bits(bf16) == h << 16, "%x", h);
        CHECK(isnan(bf16) ? isnan(rope_bf16_to_f32(rope_f32_to_bf16(bf16))) : rope_f32_to_bf16(bf16) == h, "%x", h);

        /* between this number and the next: below the middle, at it, above; to infinity as if it were the next */
        if ((h & 0x7fff) < 0x7c00) {
            const double next =
                (h & 0x7fff) == 0x7bff ? copysign(65536, f16) : (double)rope_f16_to_f32((uint16_t)(h + 1));
            const float middle = (float)(((double)f16 + next) / 2);
            CHECK(rope_f32_to_f16(nextafterf(middle, 0)) == h && rope_f32_to_f16(middle) == h + (h & 1) &&
                      rope_f32_to_f16(nextafterf(middle, copysignf(INFINITY, middle))) == h + 1,
                  "%x", h);
        }
        if ((h & 0x7fff) < 0x7f80) {
            const float middle = rope_bits_to_f32(h << 16 | 0x8000);
            CHECK(rope_f32_to_bf16(rope_bits_to_f32(h << 16 | 0x7fff)) == h &&
                      rope_f32_to_bf16(middle) == h + (h & 1) &&
                      rope_f32_to_bf16(rope_bits_to_f32(h << 16 | 0x8001)) == h + 1,
                  "%x", h);
        }
    }
    static const int64_t whole[] = {0, 1, -1, INT64_MAX, INT64_MIN, (1ll << 53) + 1, -(1ll << 62) - 4095};
    for (int i = 0; i < 7; i++) {
        const uint64_t positive = (uint64_t)whole[i];
        double low, high = rope_read(whole, ROPE_I64, i, &low);
        CHECK((long double)high + (long double)low == (long double)whole[i], "%lld", (long long)whole[i]);
        high = rope_read(&positive, ROPE_U64, 0, &low);
        CHECK((long double)high + (long double)low == (long double)positive, "%llu", (unsigned long long)positive);
    }
}

/* The kernels' loads and stores of all halves against the scalar ones, through a rotation: the same in float32 gives
 * what was rounded. By 2^-12 (cos 1, sin 2^-12 to the last bit) the second channel puts the first in a tie. */
static void check_kernel_conversions(rope_dtype dtype, int64_t block, float angle) {
    enum { PAIRS = 64, TOKENS = 65536 / PAIRS };
    static uint16_t halves[2 * 65536], result[2 * 65536];
    static float wide[2 * 65536], wide_result[2 * 65536];
    for (int h = 0; h < 65536; h++) {
        const int pair = h % PAIRS, row = h - pair, first = block == 2 ? 2 * pair : pair;
        const int at0 = 2 * row + first, at1 = at0 + (block == 2 ? 1 : PAIRS);
        const int exponent = dtype == ROPE_F16 ? (h & 0x7c00) + 0x0400 : (h & 0x7f80) + 0x0200;
        halves[at0] = (uint16_t)h;
        halves[at1] = (uint16_t)(exponent < (dtype == ROPE_F16 ? 0x7c00 : 0x7f80) ? exponent : 0);
        for (int i = 0; i < 2; i++) {
            const uint16_t half = halves[i ? at1 : at0];
            wide[i ? at1 : at0] = dtype == ROPE_F16 ? rope_f16_to_f32(half) : rope_bf16_to_f32(half);
        }
    }
    rope_args args = contiguous(dtype, TOKENS, 1, PAIRS, block, halves, result);
    rope_args wide_args = contiguous(ROPE_F32, TOKENS, 1, PAIRS, block, wide, wide_result);
    args.freqs = wide_args.freqs = (rope_operand){.data = &angle, .dtype = ROPE_F32};
    int ties = 0;
    const char *isa;
    for (int index = 0; (isa = next_isa(&index)) != NULL;) {
        CHECK(!run(&args, forwards) && !run(&wide_args, forwards), "%s", isa);
        for (int i = 0; i < 2 * 65536; i++) {
            const float value = wide_result[i];
            const uint16_t want = dtype == ROPE_F16 ? rope_f32_to_f16(value) : rope_f32_to_bf16(value);
            const float got = dtype == ROPE_F16 ? rope_f16_to_f32(result[i]) : rope_bf16_to_f32(result[i]);
            CHECK(isnan(value) ? isnan(got) : result[i] == want, "%s: %a gives %x, want %x", isa, (double)value,
                  result[i], want);
            ties += (rope_f32_to_bits(value) & (dtype == ROPE_F16 ? 0x1fff : 0xffff)) ==
                    (dtype == ROPE_F16 ? 0x1000 : 0x8000);
        }
    }
    CHECK(angle > 0x1p-12f || ties > 20000, "only %d ties", ties);
}

void test_conversions(void) {
    check_conversions();
    for (int i = 0; i < 8; i++)
        check_kernel_conversions(i & 1 ? ROPE_F16 : ROPE_BF16, i & 2 ? 2 : 128, i & 4 ? 0x1p-12f : 1.0f);
}
