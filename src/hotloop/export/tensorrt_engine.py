"""An ONNX file as a TensorRT engine, for the card and the TensorRT that are here."""

from pathlib import Path
from typing import Any

import numpy as np

from hotloop.core.errors import HotloopError, InputError
from hotloop.export.source import Arrays, Forward, Source

_USUAL_BATCH = 8
"""For which it is made fastest."""


def require() -> Any:
    """TensorRT's own package, and a card.

    Raises:
        InputError: there is none here.
    """
    import torch

    try:
        import tensorrt
    except ImportError:
        cause = "NVIDIA's package tensorrt is not installed here"
        raise InputError("a TensorRT engine cannot be built", cause, "pip install tensorrt, or --to onnx") from None
    if not torch.cuda.is_available():
        cause = "an engine is built on the card that runs it, and torch sees none"
        raise InputError("a TensorRT engine cannot be built", cause, "export it on that machine, or --to onnx")
    return tensorrt


def write_engine(onnx_file: Path, engine_file: Path, source: Source, largest: int) -> None:
    """Build an engine from an ONNX file, in the file's own precision. Takes minutes.

    Args:
        largest: batch that it has to take.

    Raises:
        HotloopError: TensorRT cannot build it; it says of which operation.
    """
    tensorrt = require()
    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    builder = tensorrt.Builder(logger)
    # The file's types are kept. TensorRT 11 knows nothing else: it has no flag for FP16 any more.
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_file)):
        raise _not_built(str(parser.get_error(0).desc()))
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.clear_flag(tensorrt.BuilderFlag.TF32)
    for number, one in enumerate(source.inputs):
        shape = tuple(network.get_input(number).shape)
        sizes = [
            tuple(
                size if size >= 0 else batch if one.varying[axis] == "batch" else source.longest[one.varying[axis]]
                for axis, size in enumerate(shape)
            )
            for batch in (1, min(_USUAL_BATCH, largest), largest)
        ]
        profile.set_shape(one.name, *sizes)
    config.add_optimization_profile(profile)
    built = builder.build_serialized_network(network, config)
    if built is None:
        raise _not_built("TensorRT's log above says why")
    engine_file.write_bytes(bytes(built))


def engine_forward(engine_file: Path, source: Source) -> Forward:
    """Run by TensorRT on the first card."""
    import torch

    tensorrt = require()
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(engine_file.read_bytes())
    context = engine.create_execution_context()
    like = {name: np.empty(0, tensorrt.nptype(engine.get_tensor_dtype(name))) for name in source.outputs}
    kinds = {name: torch.from_numpy(array).dtype for name, array in like.items()}

    def forward(arrays: Arrays) -> Arrays:
        tensors = [torch.from_numpy(array).cuda() for array in arrays]
        for one, tensor in zip(source.inputs, tensors, strict=True):
            context.set_input_shape(one.name, tuple(tensor.shape))
            context.set_tensor_address(one.name, tensor.data_ptr())
        outputs = [
            torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtype, device="cuda")
            for name, dtype in kinds.items()
        ]
        for name, tensor in zip(kinds, outputs, strict=True):
            context.set_tensor_address(name, tensor.data_ptr())
        stream = torch.cuda.current_stream()
        if not context.execute_async_v3(stream.cuda_stream):
            raise HotloopError("TensorRT cannot run the engine", "its log above says why", "--to onnx")
        stream.synchronize()
        return [tensor.cpu().numpy() for tensor in outputs]

    return forward


def _not_built(cause: str) -> HotloopError:
    return HotloopError("TensorRT cannot build an engine", cause[:300], "--to onnx, or another --opset")
