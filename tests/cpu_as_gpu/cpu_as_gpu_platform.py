"""The platform of :mod:`cpu_as_gpu`, in a file of its own: it can be imported only when vLLM asks
for its class."""

import os

from vllm.platforms.cpu import CpuPlatform


class AsGpu(CpuPlatform):  # type: ignore[misc]
    """vLLM's CPU platform, which does not turn async scheduling off."""

    @classmethod
    def check_and_update_config(cls, vllm_config):
        asked = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        if os.environ.get("CPU_AS_GPU_ASYNC") == "1":
            vllm_config.scheduler_config.async_scheduling = asked
