#!/bin/sh
# The vLLM project's router (pip install vllm-router) in front of two engines: what has the same X-Session-ID goes to the
# same engine, and to another one when that engine dies.
#   ENGINE_1=10.0.0.1:8000 ENGINE_2=10.0.0.2:8000 sh deploy/routing/vllm-router.sh
exec vllm-router \
    --host "${ROUTER_HOST:-0.0.0.0}" --port "${ROUTER_PORT:-8000}" \
    --prometheus-port "${ROUTER_METRICS_PORT:-29000}" \
    --worker-urls "http://${ENGINE_1:-127.0.0.1:8001}" "http://${ENGINE_2:-127.0.0.1:8002}" \
    --policy "${ROUTER_POLICY:-consistent_hash}" \
    --health-check-interval-secs 2 --health-failure-threshold 2 --health-success-threshold 1
