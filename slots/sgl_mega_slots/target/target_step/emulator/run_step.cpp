// The step kernel as a function of a shared library.
#include "step.cu"

namespace {
const mega::Params* params = nullptr;
void body() { target_step(*params); }
std::string error;
}  // namespace

extern "C" const char* run_step(const mega::Params* with, uint32_t seed, uint64_t shared_bytes) {
  params = with;
  error = mega::emulator::run(body, mega::kSms, mega::kThreads, shared_bytes, seed);
  return error.c_str();
}
