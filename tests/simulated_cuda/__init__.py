"""CUDA devices in host memory, for tests of device code without a GPU.

A CPU build of torch believes in eight CUDA devices: tensors say "cuda:N", operators run at once on the CPU, and the
process group "nccl" moves bytes through shared memory, with NCCL's rules. Nothing here knows speed, kernels or NCCL's
own faults; it knows order. Streams and the host are vector clocks, so that an access without an order, memory that is
freed while another stream uses it, and pinned memory that is read too early are reported with their place in Python,
and each wait of the host and each collective is counted.

`device.install()` must come before torch is imported, so it runs in processes of its own: see `harness.forkserver`, and
`python -m simulated_cuda`. The device uses private interfaces of torch and fits the version of constraints.txt;
`device.problem()` says why it can't be used elsewhere.
"""
