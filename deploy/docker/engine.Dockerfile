# vLLM with kvtier in it. From the root of a checkout:
#   docker build -f deploy/docker/engine.Dockerfile -t kvtier-engine .
#   docker run --gpus all -p 8000:8000 -e OPTION_LMCACHE_AUTO_CONFIG=true -v /mnt/nvme:/mnt/nvme kvtier-engine MODEL
# vLLM 0.23, 0.29, 0.32 and 0.33 are tested; kvtier refuses older ones and says so of others.
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS build
COPY . /src
RUN python -m pip install --no-cache-dir --no-deps -r /src/requirements/images/build.txt \
    && cd /src && python -m hatchling build -t wheel -d /dist

FROM ${VLLM_IMAGE}
COPY requirements/images/engine.txt /opt/kvtier/
COPY --from=build /dist /opt/kvtier/dist
RUN python3 -m pip install --no-cache-dir --no-deps -r /opt/kvtier/engine.txt /opt/kvtier/dist/*.whl \
    && kvtier --version \
    && groupadd --gid 10001 kvtier \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/kvtier kvtier \
    && install -d -o 10001 -g 10001 -m 0700 /run/kvtier /home/kvtier/.cache /home/kvtier/.cache/huggingface

# The user of server.Dockerfile, too. Models are kept below its home: mount a volume there.
ENV HOME=/home/kvtier HF_HOME=/home/kvtier/.cache/huggingface
USER 10001:10001
ENTRYPOINT ["kvtier", "launch", "--", "vllm", "serve"]
