// Instruction sets that the vector sources were built for and this CPU supports.
//
// For dispatchers, which are compiled for the baseline CPU with BOOSTER_HAS_<NAME> for each built instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

// Expands X(name) for each built instruction set, best first.
#if defined(BOOSTER_HAS_AVX512)
#include <cpuid.h>
#define BOOSTER_FOR_EACH_SET(X) X(avx512) X(avx2) X(baseline)
#elif defined(BOOSTER_HAS_NEON)
#define BOOSTER_FOR_EACH_SET(X) X(neon)
#else
#define BOOSTER_FOR_EACH_SET(X) X(baseline)
#endif

namespace booster {

#define BOOSTER_NAME(set) #set,
constexpr const char* BUILT_SETS[] = {BOOSTER_FOR_EACH_SET(BOOSTER_NAME)};

inline bool is_usable([[maybe_unused]] const std::string& set) {
#if defined(BOOSTER_HAS_AVX512)
    // With cpuid, as gcc 9 does not support the name "f16c".
    unsigned int eax, ebx, ecx, edx;
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1u << 29));
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
    if (set == "avx2") return has_avx2;
    if (set == "avx512") {
        return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
#endif
    return true;
}

// Returns the names of the usable instruction sets, best first.
inline std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    std::copy_if(std::begin(BUILT_SETS), std::end(BUILT_SETS), std::back_inserter(names), is_usable);
    return names;
}

// Returns the index in BUILT_SETS of a usable set, or of the best one for "". Throws std::invalid_argument otherwise.
inline std::size_t chosen_set(const std::string& wanted) {
    static const std::vector<std::string> usable = instruction_sets();
    const std::string& name = wanted.empty() ? usable.front() : wanted;
    if (std::find(usable.begin(), usable.end(), name) == usable.end()) {
        throw std::invalid_argument("instruction set '" + wanted + "' can't be used on this CPU");
    }
    return static_cast<std::size_t>(std::find(std::begin(BUILT_SETS), std::end(BUILT_SETS), name) - BUILT_SETS);
}

}  // namespace booster
