// The step kernel as a function of a shared library.
#include "step.cu"

namespace {
const mega::Params* params = nullptr;
void body() { target_step(*params); }
std::string error;
}  // namespace

// Pairs of bf16 values of four fp8 ones each, for a test of all of them.
extern "C" void widen(const uint32_t* fours, uint32_t* pairs, int count) {
  for (int i = 0; i < count; ++i) mega::widen_fp8(fours[i], pairs[2 * i], pairs[2 * i + 1]);
}

// fp8 values of pairs of fp32 ones.
extern "C" void narrow(const float* values, uint16_t* pairs, int count) {
  for (int i = 0; i < count; ++i) pairs[i] = mega::pack_fp8(values[2 * i], values[2 * i + 1]);
}

extern "C" const char* run_step(const mega::Params* with, uint32_t seed, uint64_t shared_bytes) {
  params = with;
  error = mega::emulator::run(body, mega::kSms, mega::kThreads, shared_bytes, seed);
  return error.c_str();
}
