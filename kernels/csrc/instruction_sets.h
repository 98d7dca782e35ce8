// Instruction sets that the vector sources were built for and this CPU supports.
//
// For dispatchers, which are compiled for the baseline CPU with BOOSTER_HAS_<NAME> for each built instruction set.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#if defined(BOOSTER_HAS_AVX2) || defined(BOOSTER_HAS_AVX512)
#include <cpuid.h>
#endif

namespace booster {

#if defined(BOOSTER_HAS_AVX2) || defined(BOOSTER_HAS_AVX512)
// With cpuid, as gcc 9 does not support the name "f16c".
inline bool has_f16c() {
    unsigned int eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1u << 29));
}
inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
inline bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Returns the names of the usable instruction sets, best first.
inline std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
#if defined(BOOSTER_HAS_AVX512)
    if (has_avx512()) names.push_back("avx512");
#endif
#if defined(BOOSTER_HAS_AVX2)
    if (has_avx2()) names.push_back("avx2");
#endif
#if defined(BOOSTER_HAS_NEON)
    names.push_back("neon");
#else
    names.push_back("baseline");
#endif
    return names;
}

// Returns the name itself if it is usable, or the best one for "". Throws std::invalid_argument otherwise.
inline std::string chosen_instruction_set(const std::string& wanted) {
    static const std::vector<std::string> names = instruction_sets();
    if (wanted.empty()) return names.front();
    for (const std::string& name : names) {
        if (name == wanted) return name;
    }
    throw std::invalid_argument("instruction set '" + wanted + "' can't be used on this CPU");
}

}  // namespace booster
