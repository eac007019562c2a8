"""Makes the site: pages from the registry, docstrings and scripts that are run."""
