"""Rows about pictures, their names and how they are processed; and prompts that are no tokens."""

from dataclasses import replace

from tests.integration.tiny_models import image_token, make_seeing
from tests.trust.identity.lives import Spec
from tests.trust.identity.rows import (
    ANSWERS,
    CONTROL,
    Base,
    Row,
    config,
    document,
    engine,
    family,
    own_model,
    switch,
)

_TEXT = 200


def seeing(folder):
    model = make_seeing(folder / "model")
    return Spec(model, tuple(shown(model, number) for number in (1, 2)))


def shown(model, number, **more):
    """A picture within a text."""
    text = document(50, _TEXT)
    return {"tokens": [*text[:10], image_token(model), *text[10:]], "pictures": [number]} | more


def named_by_client(folder):
    spec = seeing(folder)
    names = {"multi_modal_uuids": {"image": ["scan.png"]}}
    return replace(spec, prompts=(shown(spec.model, 1, **names),))


def named_by_counter(folder):
    spec = seeing(folder)
    return replace(spec, prompts=(shown(spec.model, 1),)).engine_with(
        enable_prefix_caching=False, mm_processor_cache_gb=0
    )


def embedded(folder):
    spec = family()(folder)
    prompts = tuple({"embeds": seed, "shape": [257, 128]} for seed in (1, 2))
    return replace(spec, prompts=prompts).engine_with(enable_prompt_embeds=True)


def other_pictures(spec, _):
    prompts = tuple({**one, "pictures": [one["pictures"][0] + 10]} for one in spec.prompts)
    return replace(spec, prompts=prompts)


def other_embeddings(spec, _):
    return replace(
        spec, prompts=tuple({**one, "embeds": one["embeds"] + 5} for one in spec.prompts)
    )


def processor(*path, value):
    """Another value in what the model's folder says about its processor."""

    def change(spec, folder):
        name = "preprocessor_config.json"
        where = path
        if not (spec.model / name).exists():
            name, where = "processor_config.json", ("image_processor", *path)
        return config(*where, value=value, of=name)(spec, folder)

    return change


def asked_with(**kwargs):
    """The request brings processor options."""

    def change(spec, _):
        return replace(
            spec, prompts=tuple({**one, "mm_processor_kwargs": kwargs} for one in spec.prompts)
        )

    return change


BASES = [
    Base("seeing", seeing),
    Base("named", named_by_client),
    Base("counted", named_by_counter),
    Base("embedded", embedded),
]

_MEAN = {"image_mean": [0.3, 0.3, 0.3]}
ROWS = [
    Row(CONTROL, "seeing", lambda spec, _: spec, None, warm=True),
    Row("the model by its whole path", "seeing",
        lambda spec, folder: replace(own_model(spec, folder)[0], by_path=True), None),
    Row("other pictures", "seeing", other_pictures, slice=True),
    Row("the same name, another picture", "named", other_pictures, slice=True),
    Row("the same name, other processor options of the request", "named",
        asked_with(image_mean=[0.1, 0.1, 0.1])),
    Row("the same name, other processor options of the engine", "named",
        engine(mm_processor_kwargs=_MEAN)),
    Row("the same name, image_mean of the folder's processor", "named",
        processor("image_mean", value=[0.2, 0.2, 0.2])),
    Row("the same name and picture", "named", lambda spec, _: spec, None),
    Row("named by a counter, another picture", "counted", other_pictures, slice=True),
    Row("image_mean of the folder's processor", "seeing",
        processor("image_mean", value=[0.2, 0.2, 0.2]), slice=True),
    Row("image_std of the folder's processor", "seeing",
        processor("image_std", value=[0.9, 0.9, 0.9])),
    Row("rescale_factor of the folder's processor", "seeing",
        processor("rescale_factor", value=0.002)),
    Row("resample of the folder's processor", "seeing", processor("resample", value=0), None),
    Row("do_normalize of the folder's processor", "seeing", processor("do_normalize", value=False)),
    Row("mm_processor_kwargs of the engine", "seeing", engine(mm_processor_kwargs=_MEAN)),
    Row("mm_processor_kwargs of the request", "seeing", asked_with(image_mean=[0.1, 0.1, 0.1])),
    Row("mm_processor_kwargs do_normalize", "seeing",
        engine(mm_processor_kwargs={"do_normalize": False})),
    Row("vision_config rms eps", "seeing", config("vision_config", "layer_norm_eps", value=0.5)),
    Row("vision_config hidden_act", "seeing", config("vision_config", "hidden_act", value="relu")),
    switch(base="seeing", mm_hasher_algorithm="sha256"),
    switch("model_config.multimodal_config", "seeing", mm_processor_cache_gb=0, warm=True),
    switch(base="seeing", limit_mm_per_prompt={"image": 2}, warm=True),
    switch(base="seeing", media_io_kwargs={"image": {"image_mode": "L"}}),
    switch(base="seeing", mm_encoder_attn_backend="TORCH_SDPA"),
    switch(base="seeing", video_pruning_rate=0.5),
    switch(base="seeing", skip_mm_profiling=True, warm=True),
    Row("other prompt embeddings of one shape", "embedded", other_embeddings, ANSWERS, slice=True),
]  # fmt: skip
