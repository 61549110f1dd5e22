"""A slot at the seam ``target_forward`` in place of SGLang's forward of a dense target, for its verify steps.

``reasons`` says from a server's settings whether it can be, ``model_checks`` from the loaded model; ``linears`` knows
SGLang's linear layers, ``dense_model`` reads the model into the seam's arguments, ``kv_pool`` the KV cache, and
``verify_forward`` is what SGLang calls.
"""
