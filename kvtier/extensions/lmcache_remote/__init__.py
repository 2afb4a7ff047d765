"""LMCache over a kvtier server, as a remote storage plug-in of LMCache's own kind (tested with
lmcache 0.5.6). No fork is needed.

Five lines in the YAML that ``LMCACHE_CONFIG_FILE`` names:

.. code-block:: yaml

    remote_storage_plugins: ["kvtier"]
    extra_config:
      remote_storage_plugin.kvtier.module_path: kvtier.connectors.lmcache.plugin
      remote_storage_plugin.kvtier.class_name: KVTier
      remote_storage_plugin.kvtier.server: unix:///run/kvtier/kvtier.sock   # or tcp://host:port

README.md in this folder says the rest. Nothing outside this package imports lmcache. In this
package only ``plugin.py`` imports it, and LMCache loads that.
"""
