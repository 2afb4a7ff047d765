"""A kvtier server as the storage of SGLang's HiCache (tested with sglang 0.5.23). No fork is
needed: ``kvtier launch -- python -m sglang.launch_server --model-path M`` with ``KVTIER_SERVER``
set, or SGLang's own flags, which README.md in this folder has.

Nothing outside this package imports sglang. In this package only ``hicache.py`` imports it, and
SGLang loads that.
"""
