"""Parts of guards: records, comparisons and modes of torch functions."""
