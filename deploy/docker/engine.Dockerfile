# vLLM with kvtier in it. From the root of a checkout:
#   docker build -f deploy/docker/engine.Dockerfile -t kvtier-engine .
#   docker run --gpus all -p 8000:8000 -e OPTION_LMCACHE_AUTO_CONFIG=true -v /mnt/nvme:/mnt/nvme kvtier-engine MODEL
# vLLM 0.29 and 0.32 are tested; `kvtier launch` refuses older ones and says so of newer ones.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
FROM ${VLLM_IMAGE}

COPY . /opt/kvtier
RUN python3 -m pip install --no-cache-dir /opt/kvtier && kvtier version

ENTRYPOINT ["kvtier", "launch", "--", "vllm", "serve"]
