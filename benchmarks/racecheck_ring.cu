// racecheck and a ring of one stage (see sanitize.py): bulk copies, read by two warps, given back by one lane of each (with SYNC after the
// warp has met) or by all 64. The last two are right by PTX's memory model; racecheck reports the first two.
// for f in "-DARRIVALS=2" "-DARRIVALS=2 -DSYNC" -DARRIVALS=64: nvcc -arch=sm_90a $f -o ring racecheck_ring.cu && compute-sanitizer
// --tool racecheck ./ring
#include <cstdint>
#include <cstdio>
__device__ uint32_t at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void wait(uint64_t *b, int parity) {
    asm volatile("{ .reg .pred p; L%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L%=; }" ::"r"(at(b)), "r"(parity) : "memory");
}
__global__ void k(const float *from, float *to) {
    __shared__ alignas(128) float box[64];
    __shared__ alignas(8) uint64_t full, empty;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(&full)));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(&empty)), "r"(ARRIVALS));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    if (threadIdx.x >= 64) {
        if (threadIdx.x == 64)
            for (int i = 0; i < 4; i++) {
                if (i) wait(&empty, (i - 1) & 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" ::"r"(at(&full)) : "memory");
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(at(box)), "l"(from + 64 * i), "r"(at(&full)) : "memory");
            }
    } else {
        for (int i = 0; i < 4; i++) {
            wait(&full, i & 1);
            to[64 * i + threadIdx.x] = box[63 - threadIdx.x] + 1;
#ifdef SYNC
            __syncwarp();
#endif
            if (ARRIVALS == 64 || threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(&empty)) : "memory");
        }
    }
}
int main() {
    float *a, *b;
    cudaMalloc(&a, 1024); cudaMalloc(&b, 1024); cudaMemset(a, 0, 1024);
    k<<<1, 96>>>(a, b);
    printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
