"""The words in which a family is written: rules of weights and rows of config.json."""
