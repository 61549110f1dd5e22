"""The conformance kit: runs a slot's cases on its implementation and its reference and compares them.

``runner.conform`` is what the CLI and the pytest plugin call; ``report`` holds the results. This
package imports nothing at import, so that pytest can load the plugin in any process.
"""
