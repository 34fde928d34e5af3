"""Shapes of published models, from the tables of their papers and their configs."""

from flexmarl.actors.model_shape import ModelShape


def dense(
    layers: int, hidden: int, intermediate: int, heads: int, key_heads: int, vocabulary: int
) -> ModelShape:
    """A gated decoder with untied embeddings, and heads of 128."""
    head_dim = 128
    attention = hidden * head_dim * (2 * heads + 2 * key_heads)
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    outside = 2 * vocabulary * hidden + hidden
    return ModelShape(
        parameters=layers * layer + outside,
        layers=layers,
        layer_parameters=layer,
        outside_parameters=outside,
        largest_tensor=vocabulary * hidden,
        linear_parameters=layers * (attention + 3 * hidden * intermediate),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        context=32768,
        experts=1,
        is_gated=True,
        norms_heads=False,
        adapted=(),
    )


QWEN_7B = dense(28, 3584, 18944, 28, 4, 152064)
QWEN_14B = dense(48, 5120, 13824, 40, 8, 152064)
QWEN_32B = dense(64, 5120, 27648, 40, 8, 152064)
LLAMA_8B = dense(32, 4096, 14336, 32, 8, 128256)
LLAMA_70B = dense(80, 8192, 28672, 64, 8, 128256)
QWEN3_32B = dense(64, 5120, 25600, 64, 8, 151936)
