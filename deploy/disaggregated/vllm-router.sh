#!/bin/sh
# The vLLM project's router (pip install vllm-router) in front of a prefill engine and a decode
# engine. More engines: one more --prefill or --decode each.
#   PREFILL_1=10.0.0.1:8000 DECODE_1=10.0.0.2:8000 sh deploy/disaggregated/vllm-router.sh
exec vllm-router \
    --host "${ROUTER_HOST:-0.0.0.0}" --port "${ROUTER_PORT:-8000}" \
    --prometheus-port "${ROUTER_METRICS_PORT:-29000}" \
    --vllm-pd-disaggregation --kv-connector nixl --policy consistent_hash \
    --prefill "http://${PREFILL_1:-127.0.0.1:8001}" --decode "http://${DECODE_1:-127.0.0.1:8002}"
