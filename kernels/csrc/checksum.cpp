// CRC-32 of zlib, gzip and PNG, with the best instructions that the CPU has.
//
// Everything below is the same polynomial division over GF(2), with the same result:
//   vpclmulqdq   256 bytes at a time in 4 registers of 512 bits, folded by carry-less multiplication
//   pclmulqdq    64 bytes in 4 registers of 128 bits, likewise
//   crc32        8 bytes by one instruction of ARM
// CPUs without any of them should use zlib: 8 tables ("slicing by 8") took almost three times as long.
// Folding: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.
//
// Note [Reflected registers]: this CRC processes the lowest bit of a byte first, so a register loaded from memory holds
// its polynomial reversed: bit i of w bits is the coefficient of x^(w-1-i), and a right shift multiplies by x. The
// carry-less product of two such 64-bit registers A and B has 127 bits; read as a 128-bit register it is A * B * x.
//
// Note [Folding]: a register is replaced by one with the same remainder, D bits further in the message, where it is
// added (xor). Its first 64 bits are H * x^64 and its last ones L, and
//   (H * x^64 + L) * x^D  =  H * x * x^(D+63)  +  L * x * x^(D-1),
// so two products with the 32-bit remainders of x^(D+63) and x^(D-1) suffice. The result is a short message with the
// same remainder, which the next smaller method continues with.

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#define BOOSTER_X86 1
#include <immintrin.h>
#elif defined(__aarch64__) && (defined(__linux__) || defined(__ARM_FEATURE_CRC32))
#define BOOSTER_ARM 1
#include <arm_acle.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

namespace py = pybind11;

namespace {

constexpr std::uint32_t POLYNOMIAL = 0xEDB88320u;  // without x^32, backwards

// Every method maps the state after some bytes to the state after more bytes. The initial state is all ones.
using Update = std::uint32_t (*)(std::uint32_t state, const std::uint8_t* data, std::size_t length);

constexpr std::uint32_t times_x(std::uint32_t remainder) {
    return (remainder >> 1) ^ ((remainder & 1) != 0 ? POLYNOMIAL : 0);
}

// ---- A byte at a time, for what is too short for the others

struct Table {
    std::uint32_t remainders[256];
};

constexpr Table make_table() {
    Table table{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t remainder = byte;
        for (int bit = 0; bit < 8; ++bit) remainder = times_x(remainder);
        table.remainders[byte] = remainder;
    }
    return table;
}

constexpr Table TABLE = make_table();

[[maybe_unused]] std::uint32_t update_by_table(std::uint32_t state, const std::uint8_t* data, std::size_t length) {
    for (; length > 0; ++data, --length) state = (state >> 8) ^ TABLE.remainders[(state ^ *data) & 0xFF];
    return state;
}

// ---- By folding

#if BOOSTER_X86

// Returns x^exponent modulo the polynomial as a 64-bit register; see Note [Reflected registers].
constexpr std::uint64_t power_of_x(int exponent) {
    std::uint32_t remainder = 0x80000000u;  // x^0
    for (int i = 0; i < exponent; ++i) remainder = times_x(remainder);
    return static_cast<std::uint64_t>(remainder) << 32;
}

// Constants that move a 128-bit register by DISTANCE bits; see Note [Folding].
template <int DISTANCE>
struct Fold {
    static constexpr long long FIRST_HALF = static_cast<long long>(power_of_x(DISTANCE + 63));
    static constexpr long long SECOND_HALF = static_cast<long long>(power_of_x(DISTANCE - 1));
};

#define BOOSTER_PCLMULQDQ __attribute__((target("pclmul,sse4.1")))
#define BOOSTER_VPCLMULQDQ __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))

template <int DISTANCE>
BOOSTER_PCLMULQDQ inline __m128i fold_128(__m128i value, __m128i next) {
    const __m128i powers = _mm_set_epi64x(Fold<DISTANCE>::SECOND_HALF, Fold<DISTANCE>::FIRST_HALF);
    const __m128i first = _mm_clmulepi64_si128(value, powers, 0x00);
    const __m128i second = _mm_clmulepi64_si128(value, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, second), next);
}

BOOSTER_PCLMULQDQ inline __m128i load_128(const std::uint8_t* data) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

BOOSTER_PCLMULQDQ std::uint32_t update_by_pclmulqdq(std::uint32_t state, const std::uint8_t* data,
                                                    std::size_t length) {
    if (length < 64) return update_by_table(state, data, length);
    __m128i sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = load_128(data + 16 * i);
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(state)));
    for (data += 64, length -= 64; length >= 64; data += 64, length -= 64) {
        for (int i = 0; i < 4; ++i) sums[i] = fold_128<512>(sums[i], load_128(data + 16 * i));
    }
    __m128i sum = sums[0];
    for (int i = 1; i < 4; ++i) sum = fold_128<128>(sum, sums[i]);
    for (; length >= 16; data += 16, length -= 16) sum = fold_128<128>(sum, load_128(data));
    std::uint8_t rest[16];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), sum);
    return update_by_table(update_by_table(0, rest, sizeof rest), data, length);
}

BOOSTER_VPCLMULQDQ inline __m512i fold_512(__m512i value, __m512i powers, __m512i next) {
    const __m512i first = _mm512_clmulepi64_epi128(value, powers, 0x00);
    const __m512i second = _mm512_clmulepi64_epi128(value, powers, 0x11);
    return _mm512_ternarylogic_epi64(first, second, next, 0x96);  // xor of three
}

BOOSTER_VPCLMULQDQ std::uint32_t update_by_vpclmulqdq(std::uint32_t state, const std::uint8_t* data,
                                                      std::size_t length) {
    constexpr std::size_t STEP = 4 * 64;
    if (length < 2 * STEP) return update_by_pclmulqdq(state, data, length);
    using Powers = Fold<8 * static_cast<int>(STEP)>;
    const __m512i powers = _mm512_set4_epi64(Powers::SECOND_HALF, Powers::FIRST_HALF, Powers::SECOND_HALF,
                                             Powers::FIRST_HALF);
    __m512i sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = _mm512_loadu_si512(data + 64 * i);
    const __m128i start = _mm_cvtsi32_si128(static_cast<int>(state));
    sums[0] = _mm512_xor_si512(sums[0], _mm512_inserti32x4(_mm512_setzero_si512(), start, 0));
    for (data += STEP, length -= STEP; length >= STEP; data += STEP, length -= STEP) {
        for (int i = 0; i < 4; ++i) sums[i] = fold_512(sums[i], powers, _mm512_loadu_si512(data + 64 * i));
    }
    std::uint8_t rest[STEP];
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(rest + 64 * i, sums[i]);
    return update_by_pclmulqdq(update_by_pclmulqdq(0, rest, sizeof rest), data, length);
}

bool has_pclmulqdq() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

bool has_vpclmulqdq() {
    return has_pclmulqdq() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

#endif

// ---- By ARM's instruction

#if BOOSTER_ARM

#if defined(__clang__)
#define BOOSTER_CRC32 __attribute__((target("crc")))
#else
#define BOOSTER_CRC32 __attribute__((target("+crc")))
#endif

BOOSTER_CRC32 std::uint32_t update_by_crc32(std::uint32_t state, const std::uint8_t* data, std::size_t length) {
    for (; length >= 8; data += 8, length -= 8) {
        std::uint64_t word;
        std::memcpy(&word, data, sizeof word);
        state = __crc32d(state, word);
    }
    for (; length > 0; ++data, --length) state = __crc32b(state, *data);
    return state;
}

bool has_crc32() {
#if defined(__ARM_FEATURE_CRC32)
    return true;
#else
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

#endif

// ---- The choice

struct Method {
    const char* name;
    Update update;
    bool (*is_usable)();
};

// Best first; the last one ends the list.
const Method METHODS[] = {
#if BOOSTER_X86
    {"vpclmulqdq", update_by_vpclmulqdq, has_vpclmulqdq},
    {"pclmulqdq", update_by_pclmulqdq, has_pclmulqdq},
#elif BOOSTER_ARM
    {"crc32", update_by_crc32, has_crc32},
#endif
    {nullptr, nullptr, nullptr},
};

py::list instruction_sets() {
    py::list names;
    for (const Method* method = METHODS; method->name != nullptr; ++method) {
        if (method->is_usable()) names.append(method->name);
    }
    return names;
}

Update update_of(const std::string& instruction_set) {
    for (const Method* method = METHODS; method->name != nullptr; ++method) {
        if ((instruction_set.empty() || instruction_set == method->name) && method->is_usable()) return method->update;
    }
    throw std::invalid_argument("this CPU has no instruction set \"" + instruction_set + "\" for checksums");
}

// Buffer of a contiguous bytes-like object; rules and errors are Python's, as with zlib.
class Bytes {
  public:
    explicit Bytes(const py::object& object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;

    const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
    std::size_t length() const { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_;
};

// Below it, releasing and reacquiring the GIL may cost far more than the checksum.
constexpr std::size_t FEWEST_BYTES_WITHOUT_GIL = 65536;

std::uint32_t crc32(const py::object& object, std::uint32_t value, const std::string& instruction_set) {
    const Update update = update_of(instruction_set);
    const Bytes bytes(object);
    if (bytes.length() < FEWEST_BYTES_WITHOUT_GIL) return ~update(~value, bytes.data(), bytes.length());
    const py::gil_scoped_release release;
    return ~update(~value, bytes.data(), bytes.length());
}

}  // namespace

PYBIND11_MODULE(checksum_native, m) {
    m.def("instruction_sets", &instruction_sets, "What this CPU can use, best first.");
    m.def("crc32", &crc32, py::arg("data"), py::arg("value") = 0, py::arg("instruction_set") = "",
          "The number that zlib.crc32(data, value) gives.");
}
