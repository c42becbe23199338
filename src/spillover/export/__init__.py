"""Export: a model with its adapter merged in, written as other tools read it, published once it is checked.

`spillover.export.export.export_model` does it all; the modules beside it do one part each:

    settings     what to write, where and as what
    merge        the weights with the adapter in them, a block of rows at a time
    rounding     float32 to the numbers that are stored
    folder       a Hugging Face folder of safetensors
    gguf/        one GGUF file, and back again
    ollama       a Modelfile
    answers      what the trained model says, and what the exported files make of it
    check        the process that runs the exported files
    parity       how far the two agree
    publish      all at once, or not at all
"""
