// What the processor that runs this has.

#include "common.h"

#ifdef HEADRACE_X86
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int kArchRequestPermission = 0x1023;
constexpr int kAmxTileData = 18;

// Not every compiler's `__builtin_cpu_supports` knows it. What has AVX2 has it too, but for some emulators.
bool has_f16c() {
    unsigned eax = 1, ebx = 0, ecx = 0, edx = 0;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    return ecx >> 29 & 1;
}

// Linux hands out AMX's tile registers on request, once a process.
bool request_amx() {
#ifdef __linux__
    return syscall(SYS_arch_prctl, kArchRequestPermission, kAmxTileData) == 0;
#else
    return false;
#endif
}

}  // namespace
#endif

// 0: nothing these kernels can use. 1: AVX2 with FMA and F16C. 2: AVX-512 with VNNI. 3: bfloat16 as well. 4: AMX tiles for
// bfloat16 and int8 as well.
HEADRACE_API int headrace_instruction_set() {
#ifdef HEADRACE_X86
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) {
        return 0;
    }
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vnni")) {
        return 1;
    }
    if (!__builtin_cpu_supports("avx512bf16")) {
        return 2;
    }
    unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    const bool has_amx = (edx >> 22 & 1) && (edx >> 24 & 1) && (edx >> 25 & 1);
    return has_amx && request_amx() ? 4 : 3;
#else
    return 0;
#endif
}
