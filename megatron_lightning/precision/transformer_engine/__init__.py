"""Backend that computes layers by modules of NVIDIA's Transformer Engine.

Styles make the layers as for every backend, and keep their parameters, names and shard specs; this
package attaches a module of Transformer Engine to each layer that a recipe quantizes (its
*engine*), which computes with the layer's own parameters:

    library   imports, guarded; what is missing
    recipes   FP8Recipe -> Transformer Engine's
    engines   one layer's module: binds parameters, calls it
    build     which module a layer gets, with which keywords
    fusion    norm + linear, norm + MLP as one module
    state     scales and histories as tensors and JSON
    weights   weights that ranks gather as codes, in quantized tensors
    backend   attaches engines; autocast; caches of quantized weights

Transformer Engine is imported by :func:`.library.load` only.
"""
