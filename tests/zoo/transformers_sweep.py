"""Every model of transformers for causal, masked and sequence-to-sequence language, images and audio, made small."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from zoo.entry import Batch, ZooEntry
from zoo.small_configs import CHANGES, VOCABULARY, small_config
from zoo.transformers_models import LENGTH, own_loss

# By task, as in transformers' auto mappings; a class is named once.
NAMES: dict[str, str] = {
    "causal": """
        AXK1ForCausalLM AXK2ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
        BailingHybridForCausalLM BambaForCausalLM BartForCausalLM BeamForCausalLM BertGenerationDecoder
        BertLMHeadModel BigBirdForCausalLM BigBirdPegasusForCausalLM BioGptForCausalLM BitNetForCausalLM
        BlenderbotForCausalLM BlenderbotSmallForCausalLM BloomForCausalLM CTRLLMHeadModel CamembertForCausalLM
        CodeGenForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM CpmAntForCausalLM
        CwmForCausalLM Data2VecTextForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
        DeepseekV3ForCausalLM DeepseekV4ForCausalLM DiffLlamaForCausalLM DogeForCausalLM Dots1ForCausalLM
        Dots3NoteForCausalLM ElectraForCausalLM Emu3ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
        ErnieForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM
        FalconMambaForCausalLM FlexOlmoForCausalLM FlintForCausalLM FuyuForCausalLM GPT2LMHeadModel
        GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM
        Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma4ForCausalLM
        Gemma4ForConditionalGeneration Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration
        GemmaForCausalLM GitForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM
        GlmMoeDsaForCausalLM GotOcr2ForConditionalGeneration GptOssForCausalLM GraniteForCausalLM
        GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM
        GraniteSWAForCausalLM HYV3ForCausalLM HYV4ForCausalLM HeliumForCausalLM HrmTextForCausalLM
        HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Inkling2ForCausalLM
        InklingForCausalLM Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM KimiLinearForCausalLM
        Kolibri1ForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM
        Llama4ForCausalLM LlamaForCausalLM LongcatFlashForCausalLM MBartForCausalLM Mamba2ForCausalLM
        MambaForCausalLM MarianForCausalLM MegatronBertForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM
        MiniCPM3ForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM Ministral3ForCausalLM
        MinistralForCausalLM MistralForCausalLM MixtralForCausalLM MllamaForCausalLM
        ModernBertDecoderForCausalLM MoshiForCausalLM MossTranscribeDiarizeForConditionalGeneration
        MptForCausalLM MusicgenForCausalLM MusicgenMelodyForCausalLM MvpForCausalLM NanoChatForCausalLM
        NemotronForCausalLM NemotronHForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM
        OlmoForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM OpenAIGPTLMHeadModel PLBartForCausalLM
        PegasusForCausalLM PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM
        ProphetNetForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
        Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen4ExpForCausalLM
        RecurrentGemmaForCausalLM ReformerModelWithLMHead RemBertForCausalLM RoCBertForCausalLM
        RoFormerForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM RwkvForCausalLM SeedOssForCausalLM
        SmolLM3ForCausalLM SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM TrOCRForCausalLM
        VaultGemmaForCausalLM WhisperForCausalLM XGLMForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM
        XLMWithLMHeadModel XLNetLMHeadModel XmodForCausalLM YoutuForCausalLM Zamba2ForCausalLM ZambaForCausalLM
        ZayaForCausalLM xLSTMForCausalLM
    """,
    "masked": """
        AlbertForMaskedLM BertForMaskedLM BigBirdForMaskedLM CamembertForMaskedLM ConvBertForMaskedLM
        Data2VecTextForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM
        ErnieForMaskedLM EsmForMaskedLM EsmcForMaskedLM EuroBertForMaskedLM FNetForMaskedLM
        FlaubertWithLMHeadModel FunnelForMaskedLM GteForMaskedLM JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM
        LongformerForMaskedLM LukeForMaskedLM MPNetForMaskedLM MegatronBertForMaskedLM MobileBertForMaskedLM
        ModernBertForMaskedLM ModernVBertForMaskedLM MraForMaskedLM NeoMMEForMaskedLM NomicBertForMaskedLM
        NystromformerForMaskedLM PerceiverForMaskedLM ReformerForMaskedLM RemBertForMaskedLM RoCBertForMaskedLM
        RoFormerForMaskedLM RobertaForMaskedLM RobertaPreLayerNormForMaskedLM SqueezeBertForMaskedLM
        TapasForMaskedLM UltraVBertForMaskedLM UltrabertForMaskedLM XLMRobertaForMaskedLM
        XLMRobertaXLForMaskedLM XmodForMaskedLM YosoForMaskedLM
    """,
    "seq2seq": """
        AudioFlamingo3ForConditionalGeneration BartForConditionalGeneration
        BigBirdPegasusForConditionalGeneration BlenderbotForConditionalGeneration
        BlenderbotSmallForConditionalGeneration EncoderDecoderModel FSMTForConditionalGeneration
        GlmAsrForConditionalGeneration GraniteSpeechForConditionalGeneration
        GraniteSpeechPlusForConditionalGeneration LEDForConditionalGeneration LongT5ForConditionalGeneration
        M2M100ForConditionalGeneration MBartForConditionalGeneration MT5ForConditionalGeneration MarianMTModel
        MusicFlamingoForConditionalGeneration MvpForConditionalGeneration NllbMoeForConditionalGeneration
        PLBartForConditionalGeneration PegasusForConditionalGeneration PegasusXForConditionalGeneration
        ProphetNetForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen3ASRForConditionalGeneration
        SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText SwitchTransformersForConditionalGeneration
        T5ForConditionalGeneration T5Gemma2ForConditionalGeneration T5GemmaForConditionalGeneration
        UMT5ForConditionalGeneration VoxtralForConditionalGeneration
    """,
    "image": """
        BeitForImageClassification BitForImageClassification CLIPForImageClassification
        ConvNextForImageClassification ConvNextV2ForImageClassification Data2VecVisionForImageClassification
        DeiTForImageClassification Dinov2ForImageClassification Dinov2WithRegistersForImageClassification
        DonutSwinForImageClassification EfficientNetForImageClassification FocalNetForImageClassification
        HGNetV2ForImageClassification HieraForImageClassification IJepaForImageClassification
        ImageGPTForImageClassification LevitForImageClassification MetaClip2ForImageClassification
        MobileNetV1ForImageClassification MobileNetV2ForImageClassification MobileViTForImageClassification
        MobileViTV2ForImageClassification PerceiverForImageClassificationConvProcessing
        PerceiverForImageClassificationFourier PerceiverForImageClassificationLearned
        PoolFormerForImageClassification PvtForImageClassification PvtV2ForImageClassification
        RegNetForImageClassification ResNetForImageClassification SegformerForImageClassification
        Siglip2ForImageClassification SiglipForImageClassification SwiftFormerForImageClassification
        SwinForImageClassification Swinv2ForImageClassification TextNetForImageClassification
        ViTForImageClassification ViTMSNForImageClassification
    """,
    "audio": """
        ASTForAudioClassification Data2VecAudioForSequenceClassification HubertForSequenceClassification
        SEWDForSequenceClassification SEWForSequenceClassification UniSpeechForSequenceClassification
        UniSpeechSatForSequenceClassification Wav2Vec2BertForSequenceClassification
        Wav2Vec2ConformerForSequenceClassification Wav2Vec2ForSequenceClassification
        WavLMForSequenceClassification WhisperForAudioClassification
    """,
    "ctc": """
        Data2VecAudioForCTC HubertForCTC LasrForCTC ParakeetForCTC SEWDForCTC SEWForCTC UniSpeechForCTC
        UniSpeechSatForCTC Wav2Vec2BertForCTC Wav2Vec2ConformerForCTC Wav2Vec2ForCTC WavLMForCTC
    """,
    "speech": """
        CanaryForConditionalGeneration CohereAsrForConditionalGeneration DiaForConditionalGeneration
        MoonshineForConditionalGeneration Pop2PianoForConditionalGeneration SeamlessM4TForSpeechToText
        SeamlessM4Tv2ForSpeechToText Speech2TextForConditionalGeneration SpeechEncoderDecoderModel
        SpeechT5ForSpeechToText WhisperForConditionalGeneration
    """,
}
TASKS = {name: task for task, names in NAMES.items() for name in names.split()}

# Why a class of those mappings is not above.
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("Gemma3nForConditionalGeneration", "TimmWrapperForImageClassification"), "needs timm"),
    "DinatForImageClassification": "needs natten",
    **dict.fromkeys(
        ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
        "drafts from the states and the cache of another model",
    ),
    **dict.fromkeys(
        (
            *("DeiTForImageClassificationWithTeacher", "LevitForImageClassificationWithTeacher"),
            *("PPLCNetForImageClassification", "ShieldGemma2ForImageClassification"),
        ),
        "computes no loss of labels",
    ),
    **dict.fromkeys(
        (
            *("BltForCausalLM", "CohereCompassForCausalLM", "FunAsrNanoForConditionalGeneration"),
            *("KyutaiSpeechToTextForConditionalGeneration", "MoonshineStreamingForConditionalGeneration"),
            *("Nemotron3_5TranscribeForConditionalGeneration", "GraniteSpeech5ForCTC"),
            "CvtForImageClassification",
        ),
        "sizes of its parts depend on each other, and no small ones were found",
    ),
    **dict.fromkeys(
        (
            *("Phi4MultimodalForCausalLM", "VibeVoiceAsrForConditionalGeneration"),
            "VibeVoiceForConditionalGeneration",
        ),
        "above 5 M parameters, by convolutions of fixed sizes",
    ),
    "IBertForMaskedLM": "keeps, as buffers, ranges of activations of a process's own batch",
    "VoxtralRealtimeForConditionalGeneration": "takes speech and text that are aligned",
}

# A sample's output depends on the others of its batch, by batch normalization.
_MIXES_SAMPLES = """
    CanaryForConditionalGeneration CohereAsrForConditionalGeneration EfficientNetForImageClassification
    HGNetV2ForImageClassification LasrForCTC LevitForImageClassification MobileNetV1ForImageClassification
    MobileNetV2ForImageClassification MobileViTForImageClassification MobileViTV2ForImageClassification
    ParakeetForCTC PerceiverForImageClassificationConvProcessing RegNetForImageClassification
    ResNetForImageClassification SeamlessM4TForSpeechToText SwiftFormerForImageClassification
    TextNetForImageClassification Wav2Vec2ConformerForCTC Wav2Vec2ConformerForSequenceClassification
"""
MIXES_SAMPLES = frozenset(_MIXES_SAMPLES.split())

_WAVE = 1600  # samples of a waveform
_FRAMES = 64


@functools.cache
def _class_and_config(name: str) -> tuple[type, Any]:
    import transformers

    model_class = getattr(transformers, name)
    return model_class, small_config(model_class.config_class, CHANGES.get(name))


def _build(name: str) -> torch.nn.Module:
    model_class, config = _class_and_config(name)
    return model_class(copy.deepcopy(config))


class _Draw:
    """Random tensors for a number of samples."""

    def __init__(self, num_samples: int, vocabulary: int, generator: torch.Generator) -> None:
        self.num_samples, self.vocabulary, self.generator = num_samples, vocabulary, generator

    def ids(self, *shape: int) -> torch.Tensor:
        """Return token ids above the special tokens and below the ones that stand for images."""
        return torch.randint(4, min(self.vocabulary, 90), (self.num_samples, *shape), generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.num_samples, *shape, generator=self.generator)

    def classes(self, number: int) -> torch.Tensor:
        return torch.randint(number, (self.num_samples,), generator=self.generator)


def _sample(name: str, num_samples: int, generator: torch.Generator) -> Batch:
    model_class, config = _class_and_config(name)
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None) or VOCABULARY
    draw = _Draw(num_samples, vocabulary, generator)
    if name in _OWN_BATCHES:
        return _OWN_BATCHES[name](draw, config)
    task, main = TASKS[name], model_class.main_input_name
    if task in ("causal", "masked") or (task == "seq2seq" and "text_config" in config.sub_configs):
        return _text(draw)
    if task == "image":
        return {main: _pixels(draw, config), "labels": draw.classes(config.num_labels)}
    if task == "seq2seq" and main == "input_ids":
        return {**_text(draw), "labels": draw.ids(7)}
    labels = draw.classes(config.num_labels) if task == "audio" else draw.ids(7)
    if main == "input_values":
        return {main: draw.normal(_WAVE), "labels": labels}
    batch = {"input_features": draw.normal(_FRAMES, _num_features(config)), "labels": labels}
    if task == "ctc" and "encoder_config" in config.sub_configs:
        batch["attention_mask"] = torch.ones(num_samples, _FRAMES, dtype=torch.long)
    return batch


def _text(draw: _Draw, length: int = LENGTH) -> Batch:
    tokens = draw.ids(length)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _pixels(draw: _Draw, config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    return draw.normal(getattr(vision, "num_channels", 3), size, size)


def _num_features(config: Any) -> int:
    config = getattr(config, "encoder_config", config)
    names = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), 16)


def _codebooks(draw: _Draw, config: Any) -> Batch:
    codes = draw.ids(config.get_text_config(decoder=True).num_codebooks, LENGTH)
    return {"input_ids": codes, "labels": codes.transpose(1, 2).contiguous()}


def _patches(draw: _Draw, config: Any) -> Batch:
    vision, num = config.vision_config, draw.num_samples
    return {
        "pixel_values": draw.normal(16, vision.num_channels * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(num, 16, dtype=torch.long),
        "spatial_shapes": torch.full((num, 2), 4),
        "labels": draw.classes(config.num_labels),
    }


def _dialogue(draw: _Draw, config: Any) -> Batch:
    channels = config.decoder_config.num_channels
    codes = draw.ids(LENGTH, channels)
    return {
        "input_ids": draw.ids(LENGTH),
        "decoder_input_ids": codes,
        "labels": codes.transpose(1, 2).contiguous(),
    }


# By class, where the forward takes something else than its kin.
_OWN_BATCHES: dict[str, Callable[[_Draw, Any], Batch]] = {
    "ASTForAudioClassification": lambda draw, config: {
        "input_values": draw.normal(config.max_length, config.num_mel_bins),
        "labels": draw.classes(config.num_labels),
    },
    "DiaForConditionalGeneration": _dialogue,
    "FSMTForConditionalGeneration": lambda draw, _: _text(draw),
    "GitForCausalLM": lambda draw, config: {**_text(draw), "pixel_values": _pixels(draw, config)},
    "ImageGPTForImageClassification": lambda draw, config: {
        "input_ids": draw.ids(LENGTH),
        "labels": draw.classes(config.num_labels),
    },
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "PerceiverForMaskedLM": lambda draw, config: _text(draw, config.max_position_embeddings),
    "Pop2PianoForConditionalGeneration": lambda draw, config: {
        "input_features": draw.normal(LENGTH, config.d_model),
        "labels": draw.ids(7),
    },
    "Siglip2ForImageClassification": _patches,
    "SpeechEncoderDecoderModel": lambda draw, _: {"input_values": draw.normal(_WAVE), "labels": draw.ids(7)},
    "WhisperForAudioClassification": lambda draw, config: {
        "input_features": draw.normal(config.num_mel_bins, 2 * config.max_source_positions),
        "labels": draw.classes(config.num_labels),
    },
    "WhisperForConditionalGeneration": lambda draw, config: {
        "input_features": draw.normal(config.num_mel_bins, 2 * config.max_source_positions),
        "labels": draw.ids(7),
    },
}


def sweep_model(name: str) -> ZooEntry:
    """Return the model of a class of transformers with its batches.

    Raises:
        KeyError: the class is not in `NAMES`.
    """
    if name not in TASKS:
        raise KeyError(name)
    return ZooEntry(
        name=name,
        construct=functools.partial(_build, name),
        sample=functools.partial(_sample, name),
        loss=own_loss,
        mixes_samples=name in MIXES_SAMPLES,
        # A CTC loss exponentiates differences of log-probabilities of sequences, which are in the hundreds.
        amplifies_roundings=name in MIXES_SAMPLES or name.endswith("ForCTC"),
    )
