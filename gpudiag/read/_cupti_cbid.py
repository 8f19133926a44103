"""CUPTI callback ids -> API names, for nvprof databases, which record only the numbers.

The numbers of cupti_runtime_cbid.h and cupti_driver_cbid.h (CUDA 13.0; a number never changes its meaning), for the calls
that cost time or that gpudiag reasons about. Version and stream-mode suffixes are left out: `cudaLaunchKernel` has two.
"""

from __future__ import annotations

_RUNTIME = """
cudaGetDeviceProperties=4/440 cudaConfigureCall=8 cudaSetupArgument=9 cudaGetLastError=10 cudaPeekAtLastError=11
cudaLaunch=13/213 cudaFuncGetAttributes=15 cudaSetDevice=16 cudaGetDevice=17 cudaMalloc=20 cudaMallocPitch=21
cudaFree=22 cudaMallocHost=25 cudaFreeHost=26 cudaHostAlloc=27 cudaMemGetInfo=30 cudaMemcpy=31 cudaMemcpy2D=32
cudaMemcpyToSymbol=39 cudaMemcpyFromSymbol=40 cudaMemcpyAsync=41/225 cudaMemcpy2DAsync=44/228
cudaMemcpyToSymbolAsync=47/231 cudaMemcpyFromSymbolAsync=48/232 cudaMemset=49 cudaMemset2D=50 cudaMemsetAsync=51/235
cudaMemset2DAsync=52/236 cudaThreadSynchronize=126 cudaStreamCreate=129 cudaStreamDestroy=130/201
cudaStreamSynchronize=131/239 cudaStreamQuery=132/240 cudaEventCreate=133 cudaEventCreateWithFlags=134
cudaEventRecord=135/242 cudaEventDestroy=136 cudaEventSynchronize=137 cudaEventQuery=138 cudaEventElapsedTime=139/486
cudaMalloc3D=140 cudaMemset3D=142 cudaMemset3DAsync=143/244 cudaMemcpy3D=144 cudaMemcpy3DAsync=145/246
cudaStreamWaitEvent=147/247 cudaPointerGetAttributes=151 cudaHostRegister=152 cudaMemcpyPeer=160
cudaMemcpyPeerAsync=161 cudaMemcpy3DPeer=162 cudaMemcpy3DPeerAsync=163/250 cudaDeviceReset=164
cudaDeviceSynchronize=165 cudaStreamCreateWithFlags=198 cudaDeviceGetAttribute=200 cudaMallocManaged=206
cudaOccupancyMaxActiveBlocksPerMultiprocessor=207/210 cudaLaunchKernel=211/214
cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags=251 cudaMemPrefetchAsync=252/253/449/450
cudaLaunchCooperativeKernel=269/270 cudaLaunchCooperativeKernelMultiDevice=272 cudaLaunchHostFunc=284/285
cudaGraphLaunch=311/312 cudaEventRecordWithFlags=370/371 cudaMallocAsync=373/374 cudaFreeAsync=375/376
cudaMallocFromPoolAsync=391/392 cudaLaunchKernelExC=430/431
"""
_DRIVER = """
cuInit=1 cuCtxCreate=10/235/645/757 cuCtxSynchronize=17/800 cuModuleLoad=18 cuModuleLoadData=19 cuModuleLoadDataEx=20
cuModuleLoadFatBinary=21 cuModuleUnload=22 cuModuleGetFunction=23 cuMemAlloc=29/243 cuMemAllocPitch=31/244
cuMemFree=33/245 cuMemAllocHost=37/294 cuMemFreeHost=38 cuMemHostAlloc=39/271 cuMemcpyHtoD=43/276 cuMemcpyDtoH=45/278
cuMemcpyDtoD=47/280 cuMemcpy2D=56/287 cuMemcpy3D=58/290 cuMemcpyHtoDAsync=60/277/421 cuMemcpyDtoHAsync=62/279/422
cuMemcpyDtoDAsync=64/281/423 cuMemcpy2DAsync=68/289/424 cuMemcpy3DAsync=69/291/425 cuMemsetD8=71/249
cuMemsetD16=73/250 cuMemsetD32=75/251 cuLaunch=115 cuLaunchGrid=116 cuLaunchGridAsync=117 cuEventCreate=118
cuEventRecord=119/441 cuEventQuery=120 cuEventSynchronize=121 cuEventDestroy=122/325 cuStreamCreate=124
cuStreamQuery=125/439 cuStreamSynchronize=126/440 cuMemsetD8Async=216/428 cuMemsetD16Async=218/429
cuMemsetD32Async=220/430 cuMemcpy=248/305 cuStreamWaitEvent=295/436 cuMemHostRegister=301/379 cuMemcpyAsync=306/418
cuLaunchKernel=307/442 cuMemcpyPeer=318 cuMemcpyPeerAsync=319/426 cuLinkCreate=362/381 cuLinkAddData=363/382
cuLinkComplete=365 cuMemAllocManaged=371 cuDevicePrimaryCtxRetain=386 cuMemPrefetchAsync=467/468/716/717
cuLaunchCooperativeKernel=477/478 cuLaunchCooperativeKernelMultiDevice=480 cuGraphLaunch=514/515
cuLaunchHostFunc=527/528 cuMemAllocAsync=598/599 cuMemFreeAsync=600/601 cuLaunchKernelEx=652/653
"""


def _numbers(table: str) -> dict[int, str]:
    pairs = (entry.split("=") for entry in table.split())
    return {int(number): name for name, numbers in pairs for number in numbers.split("/")}


RUNTIME = _numbers(_RUNTIME)
DRIVER = _numbers(_DRIVER)
