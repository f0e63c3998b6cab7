"""Backend that computes layers by modules of NVIDIA's Transformer Engine.

Styles build the layers as for every backend, and keep parameters, names and shard specs. This
package attaches a module of Transformer Engine (an *engine*) to each quantized layer. The engine
computes with the layer's parameters:

    library   guarded imports, and a report of missing parts
    recipes   FP8Recipe -> Transformer Engine's
    engines   one layer's module: binds parameters, calls it
    build     module and keywords for each layer
    fusion    norm + linear, norm + MLP as one module
    state     scales and histories as tensors and JSON
    weights   weights all-gathered as quantized data, in quantized tensors
    backend   attaches engines; autocast; caches of quantized weights

Only :func:`.library.load` imports Transformer Engine.
"""
