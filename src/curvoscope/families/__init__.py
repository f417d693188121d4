"""From a model to its named blocks: the families that are known, and how their files are loaded."""
