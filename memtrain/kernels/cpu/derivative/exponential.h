// exp() as torch's vector code has it, to the bit: 2**q times a polynomial of what is left, the
// numbers of SLEEF's expf (Boost licence), in fused multiply-adds.
#pragma once

namespace memtrain::exponential {

constexpr float kInverseLog2 = 1.442695040888963407f;
constexpr float kLog2High = 0.693145751953125f, kLog2Low = 1.428606765330187045e-06f;
constexpr int kCount = 6;
constexpr float kTerms[kCount] = {0.000198527617612853646278381f, 0.00139304355252534151077271f,
                                  0.00833336077630519866943359f,  0.0416664853692054748535156f,
                                  0.166666671633720397949219f,    0.5f};

}  // namespace memtrain::exponential
