def quantized():
    from transformers import LlamaConfig, LlamaForCausalLM, BitsAndBytesConfig
    from peft import LoraConfig, get_peft_model
    import torch
    from smp.integrations.quantization import quantize
    m = LlamaForCausalLM(LlamaConfig(vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=16, num_attention_heads=8, use_cache=False))
    m = quantize(m, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True))
    return get_peft_model(m, LoraConfig(r=8, target_modules=["q_proj","v_proj"]))
