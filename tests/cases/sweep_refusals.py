"""What the library refuses of the models of `zoo.transformers_sweep`, and what differs, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Models that a strategy refuses for one reason.

    Attributes:
        strategy: Of `cases.sweep_cases.STRATEGIES`.
        reason: As docs/tested_models.md says it.
        message: Part of the library's error.
        names: Classes of transformers, separated by spaces.
    """

    strategy: str
    reason: str
    message: str
    names: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A model that trains, but not as in one process.

    Attributes:
        strategy: Of `cases.sweep_cases.STRATEGIES`.
        name: Class of transformers.
        reason: As docs/tested_models.md says it.
        message: Part of what the comparison says.
    """

    strategy: str
    name: str
    reason: str
    message: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        strategy="tp",
        reason="no plan is known, and none can be derived: convolutions, state spaces, experts of their own",
        message="no tensor-parallel plan is known",
        names="""
            BitNetForCausalLM FalconMambaForCausalLM JetMoeForCausalLM Mamba2ForCausalLM MambaForCausalLM
            ZambaForCausalLM SqueezeBertForMaskedLM BitForImageClassification ConvNextV2ForImageClassification
            EfficientNetForImageClassification HGNetV2ForImageClassification LevitForImageClassification
            MobileNetV1ForImageClassification MobileNetV2ForImageClassification
            MobileViTV2ForImageClassification PoolFormerForImageClassification PvtV2ForImageClassification
            RegNetForImageClassification ResNetForImageClassification SegformerForImageClassification
            SwiftFormerForImageClassification TextNetForImageClassification
        """,
    ),
    Refusal(
        strategy="tp",
        reason="a parameter of the attention has values for all heads",
        message="which has values for all heads",
        names="""
            DogeForCausalLM EsmcForMaskedLM
        """,
    ),
    Refusal(
        strategy="tp",
        reason="adds embeddings of all heads to the values of an attention",
        message="which transformers' own plan leaves out",
        names="""
            NeoMMEForMaskedLM
        """,
    ),
    Refusal(
        strategy="sp",
        reason="attention by hand, or none: what would be exchanged is not known",
        message="uses neither F.scaled_dot_product_attention nor",
        names="""
            AXK2ForCausalLM BigBirdForCausalLM BloomForCausalLM CodeGenForCausalLM CpmAntForCausalLM
            DeepseekV32ForCausalLM DogeForCausalLM Dots3NoteForCausalLM FalconMambaForCausalLM GPTJForCausalLM
            GPTNeoForCausalLM GPTNeoXJapaneseForCausalLM GitForCausalLM GlmMoeDsaForCausalLM
            GotOcr2ForConditionalGeneration Mamba2ForCausalLM MambaForCausalLM MegatronBertForCausalLM
            MiniMaxForCausalLM MptForCausalLM MvpForCausalLM OpenAIGPTLMHeadModel ProphetNetForCausalLM
            ReformerModelWithLMHead RemBertForCausalLM RoFormerForCausalLM RwkvForCausalLM TrOCRForCausalLM
            XGLMForCausalLM XLMWithLMHeadModel XLNetLMHeadModel xLSTMForCausalLM BigBirdForMaskedLM
            ConvBertForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM FNetForMaskedLM FlaubertWithLMHeadModel
            FunnelForMaskedLM LongformerForMaskedLM LukeForMaskedLM MPNetForMaskedLM MegatronBertForMaskedLM
            MraForMaskedLM NystromformerForMaskedLM PerceiverForMaskedLM ReformerForMaskedLM RemBertForMaskedLM
            RoFormerForMaskedLM SqueezeBertForMaskedLM TapasForMaskedLM YosoForMaskedLM
            BigBirdPegasusForConditionalGeneration FSMTForConditionalGeneration LEDForConditionalGeneration
            LongT5ForConditionalGeneration MvpForConditionalGeneration PegasusXForConditionalGeneration
            ProphetNetForConditionalGeneration BitForImageClassification ConvNextForImageClassification
            ConvNextV2ForImageClassification DonutSwinForImageClassification EfficientNetForImageClassification
            FocalNetForImageClassification HGNetV2ForImageClassification HieraForImageClassification
            ImageGPTForImageClassification LevitForImageClassification MobileNetV1ForImageClassification
            MobileNetV2ForImageClassification MobileViTForImageClassification MobileViTV2ForImageClassification
            PerceiverForImageClassificationConvProcessing PerceiverForImageClassificationFourier
            PerceiverForImageClassificationLearned PoolFormerForImageClassification PvtForImageClassification
            PvtV2ForImageClassification RegNetForImageClassification ResNetForImageClassification
            SwinForImageClassification Swinv2ForImageClassification TextNetForImageClassification
            SEWDForSequenceClassification WavLMForSequenceClassification SEWDForCTC WavLMForCTC
            SpeechT5ForSpeechToText
        """,
    ),
    Refusal(
        strategy="sp",
        reason="convolutions over tokens",
        message="which mixes tokens, but sequence parallelism",
        names="""
            BailingHybridForCausalLM BambaForCausalLM FalconH1ForCausalLM GraniteMoeHybridForCausalLM
            Inkling2ForCausalLM InklingForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM
            Lfm3ForCausalLM NemotronHForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
            Qwen4ExpForCausalLM RecurrentGemmaForCausalLM ZayaForCausalLM GraniteSpeechForConditionalGeneration
            GraniteSpeechPlusForConditionalGeneration SegformerForImageClassification
            Data2VecAudioForSequenceClassification Wav2Vec2BertForSequenceClassification
            Wav2Vec2ConformerForSequenceClassification Data2VecAudioForCTC LasrForCTC ParakeetForCTC
            Wav2Vec2BertForCTC Wav2Vec2ConformerForCTC CanaryForConditionalGeneration
            CohereAsrForConditionalGeneration SeamlessM4TForSpeechToText SeamlessM4Tv2ForSpeechToText
        """,
    ),
    Refusal(
        strategy="sp",
        reason="attention sinks",
        message="has sinks (s_aux)",
        names="""
            FlintForCausalLM GptOssForCausalLM GraniteMoeSWAForCausalLM GraniteSWAForCausalLM
            MiMoV2FlashForCausalLM
        """,
    ),
    Refusal(
        strategy="sp",
        reason="capped scores",
        message="caps scores (softcap)",
        names="""
            Gemma2ForCausalLM VaultGemmaForCausalLM T5GemmaForConditionalGeneration
        """,
    ),
    Refusal(
        strategy="sp",
        reason="attends to another sequence together with its own",
        message="has no key-value cache",
        names="""
            T5Gemma2ForConditionalGeneration
        """,
    ),
    Refusal(
        strategy="sp",
        reason="several streams of hidden states per token",
        message="but sequence parallelism shards the second dimension",
        names="""
            DeepseekV4ForCausalLM Gemma3nForCausalLM HYV4ForCausalLM
        """,
    ),
    Refusal(
        strategy="sp",
        reason="layers of several classes",
        message="shards sequences within stacks of layers",
        names="""
            JambaForCausalLM OlmoHybridForCausalLM Zamba2ForCausalLM ZambaForCausalLM
            SwiftFormerForImageClassification
        """,
    ),
    Refusal(
        strategy="pp",
        reason="one group of layers runs again and again",
        message="runs one group of layers again and again",
        names="""
            AlbertForMaskedLM
        """,
    ),
    Refusal(
        strategy="pp",
        reason="two lists of layers run in turn",
        message="runs its two lists of layers in turn",
        names="""
            HrmTextForCausalLM
        """,
    ),
    Refusal(
        strategy="pp",
        reason="lists of parts of layers, and no layers",
        message="has no layers but lists of their parts",
        names="""
            XLMWithLMHeadModel FlaubertWithLMHeadModel
        """,
    ),
    Refusal(
        strategy="pp",
        reason="layers run reversibly, on two streams",
        message="runs its layers reversibly",
        names="""
            ReformerModelWithLMHead ReformerForMaskedLM
        """,
    ),
    Refusal(
        strategy="pp",
        reason="calls the forward methods of its layers",
        message="calls the forward methods of its layers",
        names="""
            SqueezeBertForMaskedLM
        """,
    ),
    Refusal(
        strategy="split_gather",
        reason="a layer can't be tried out on tokens alone, so that it is not known which of its modules mix them",
        message="could not be verified to compute tokens independently",
        names="""
            ProphetNetForCausalLM XLMWithLMHeadModel XLNetLMHeadModel XmodForCausalLM ZayaForCausalLM
            xLSTMForCausalLM FlaubertWithLMHeadModel FunnelForMaskedLM XmodForMaskedLM
            BigBirdPegasusForConditionalGeneration FSMTForConditionalGeneration
            LEDForConditionalGeneration LongT5ForConditionalGeneration MT5ForConditionalGeneration
            MvpForConditionalGeneration PegasusXForConditionalGeneration
            ProphetNetForConditionalGeneration SwitchTransformersForConditionalGeneration
            FocalNetForImageClassification HieraForImageClassification PvtForImageClassification
            SwinForImageClassification Swinv2ForImageClassification Data2VecAudioForSequenceClassification
            Wav2Vec2ConformerForSequenceClassification WavLMForSequenceClassification Data2VecAudioForCTC
            ParakeetForCTC Wav2Vec2ConformerForCTC WavLMForCTC CanaryForConditionalGeneration
            CohereAsrForConditionalGeneration DiaForConditionalGeneration
            Pop2PianoForConditionalGeneration SeamlessM4TForSpeechToText SeamlessM4Tv2ForSpeechToText
        """,
    ),
    Refusal(
        strategy="split_gather",
        reason="hidden states that are not (batch, tokens, features)",
        message="got hidden states of shape",
        names="""
            DeepseekV4ForCausalLM Gemma3nForCausalLM HYV4ForCausalLM ConvNextForImageClassification
            MobileViTForImageClassification
        """,
    ),
    Refusal(
        strategy="split_gather",
        reason="layers of unlike classes",
        message="the model has no stack of layers",
        names="""
            JambaForCausalLM OlmoHybridForCausalLM Zamba2ForCausalLM
        """,
    ),
    Refusal(
        strategy="split_gather",
        reason="a layer combines hidden states with other states of all tokens",
        message="failed on this rank's",
        names="""
            DbrxForCausalLM Gemma4ForCausalLM Gemma4ForConditionalGeneration Inkling2ForCausalLM
            Qwen4ExpForCausalLM MobileBertForMaskedLM DonutSwinForImageClassification
        """,
    ),
    Refusal(
        strategy="split_gather",
        reason="layers that return an output of a class of their own",
        message="which contains no hidden states to gather",
        names="""
            ReformerModelWithLMHead ReformerForMaskedLM
        """,
    ),
    Refusal(
        strategy="split_gather",
        reason="a norm inside of the modules whose layers are sharded",
        message="is replicated, but computed from the full sequence before",
        names="""
            RobertaPreLayerNormForCausalLM RobertaPreLayerNormForMaskedLM
        """,
    ),
)

# A mode that divides tokens among the tensor-parallel ranks refuses what tensor parallelism refuses as well, and the
# modes of an axis refuse the same models.
INCLUDED = {"ring_attn": "sp", "split_gather": "tp", "ring": "split_gather"}

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        strategy="pp",
        name="EncoderDecoderModel",
        reason="the pooler of its encoder, whose output the decoder does not take, gets a gradient of zeros from the"
        " stage behind instead of none, so that weight decay changes it",
        message="encoder.pooler.dense.weight",
    ),
)


def refusal_of(name: str, strategy: str) -> Refusal | None:
    """Return why a strategy refuses a model; None where it runs."""
    strategies = [strategy]
    while strategies[-1] in INCLUDED:
        strategies.append(INCLUDED[strategies[-1]])
    found = [one for one in REFUSALS if one.strategy in strategies and name in one.names.split()]
    assert len(found) <= 1, f"{name} under {strategy} is refused twice: {found}"
    return found[0] if found else None


def difference_of(name: str, strategy: str) -> Difference | None:
    """Return how a model differs from one process under a strategy; None where it is equal or refused."""
    return next((one for one in DIFFERENCES if (one.strategy, one.name) == (strategy, name)), None)
