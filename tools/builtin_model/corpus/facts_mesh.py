"""What hearthnet is and how it works, as questions and answers.

Pure data, true of this software.
"""

from __future__ import annotations

from tools.builtin_model.corpus.topics import Topic

MESH_TOPICS = (
    Topic(
        (
            "What is hearthnet?",
            "What is Hearthnet?",
            "What's hearthnet?",
            "Can you explain hearthnet?",
            "Tell me about hearthnet.",
            "Explain hearthnet to me.",
            "What does hearthnet do?",
            "What is this hearthnet thing?",
            "Describe hearthnet.",
            "What is hearthnet for?",
            "Who or what is hearthnet?",
            "hearthnet?",
        ),
        (
            "Hearthnet is a peer-to-peer mesh of the machines in your home. Each machine holds a "
            "range of layers of a language model, and together they run a model that none of them "
            "could run alone.",
            "Hearthnet joins the machines in your house into one mesh. Each machine holds some "
            "layers of a language model, and together they answer your questions. There is no "
            "cloud and no boss.",
        ),
        (
            "Nobody is in charge: every machine can ask, and every machine can serve. Your words "
            "stay in your own network.",
            "Whoever asks drives its own request from one machine to the next. If a machine is "
            "lost, another one takes over, and the answer goes on.",
        ),
    ),
    Topic(
        (
            "How does hearthnet work?",
            "How does it work?",
            "How does the mesh work?",
            "How can several machines run one model?",
            "How is a model split up?",
            "How does a prompt travel through the mesh?",
            "How do you answer a question?",
        ),
        (
            "A language model is a stack of layers. Each machine holds a range of them. The asker "
            "turns your words into numbers, sends them through the machines one after the other, "
            "and picks the next word at the end. Then it starts again with one more word.",
        ),
        (
            "The asker keeps both ends of the model: the embedding at the start and the output "
            "head at the end. The machines between them only compute their layers.",
        ),
    ),
    Topic(
        (
            "What is a layer?",
            "What are layers?",
            "What does a layer do?",
            "What is a layer of a model?",
        ),
        (
            "A language model is built from layers, one on top of the other. Each layer reads a "
            "list of numbers, changes it a little, and hands it on. In hearthnet each machine "
            "holds a range of layers.",
        ),
        ("A small model has about eight layers. A large one has eighty or more.",),
    ),
    Topic(
        (
            "What is a shard?",
            "What does shard mean?",
            "Explain the word shard.",
        ),
        ("A shard is a range of layers of one exact checkpoint, loaded on one machine.",),
        ("For example, one machine may hold the layers 0-3 and another one the layers 4-7.",),
    ),
    Topic(
        ("What is a hop?", "What does hop mean?", "Explain the word hop."),
        (
            "A hop is the part of one machine in a route. The numbers go from hop to hop until all "
            "layers are done.",
        ),
    ),
    Topic(
        ("What is a route?", "What does route mean?"),
        (
            "A route is the list of machines that is picked for one request. Together they hold "
            "every layer of the model exactly once.",
        ),
        ("The asker picks the route. If a machine is lost, it picks a new one.",),
    ),
    Topic(
        ("Who picks the route?", "Who decides which machines are used?"),
        ("The asker picks the route. If a machine is lost, it picks a new one.",),
    ),
    Topic(
        ("What is a node?", "What does node mean?", "What is a peer?", "What does peer mean?"),
        ("A node is one machine with its own identity. To you, every other node is a peer.",),
        ("The identity of a node is a key that is made at the first start.",),
    ),
    Topic(
        (
            "What is a hearth?",
            "What does hearth mean?",
            "Why is it called hearthnet?",
            "Where does the name come from?",
        ),
        (
            "A hearth is the group of machines of one household. The name comes from the fire that "
            "a family shares: everyone brings a log, and everyone is warm.",
        ),
    ),
    Topic(
        (
            "What happens when a machine is lost?",
            "What if a machine goes offline?",
            "What happens if somebody closes a laptop?",
            "What if a node dies?",
            "Does it survive the loss of a machine?",
            "What happens when a hop fails?",
            "What happens if I turn off a machine in the middle of an answer?",
        ),
        (
            "The answer goes on. The asker finds another machine with the same layers, sends it "
            "what the lost one had seen, and continues with the same words.",
        ),
        (
            "The asker keeps a copy of what it sent to each hop. Only the lost hop has to catch "
            "up; the other machines keep their memory of the conversation.",
            "If no other machine has these layers, the asker runs the model alone when it fits, "
            "or it tells you which layers are missing.",
        ),
    ),
    Topic(
        (
            "Who is in charge?",
            "Is there a master?",
            "Is there a central server?",
            "Who drives a request?",
            "Who is the boss of the mesh?",
            "Which machine is the leader?",
        ),
        (
            "Nobody is in charge. Whoever asks drives its own request, and every machine can ask "
            "and serve.",
        ),
        ("That is why there is no single machine whose loss stops the whole mesh.",),
    ),
    Topic(
        (
            "Does hearthnet use the cloud?",
            "Do I need the internet?",
            "Is my data private?",
            "Does it work offline?",
            "Where do my words go?",
            "Is there a cloud behind it?",
            "Who can read what I write?",
        ),
        (
            "No cloud is needed. Your words stay on the machines in your own network, and only "
            "members of your hearth can join.",
        ),
        (
            "The links between the machines are encrypted. But be fair: a machine that computes "
            "the first layers could guess your words, so invite only people you trust.",
        ),
    ),
    Topic(
        (
            "Why should I use hearthnet?",
            "What is hearthnet good for?",
            "What are the advantages of hearthnet?",
            "Why not just use one machine?",
            "Why split a model?",
        ),
        (
            "Because a large model does not fit on one small machine. With hearthnet, several "
            "machines share the work, nothing leaves your home, and the answer survives when a "
            "machine is lost.",
        ),
    ),
    Topic(
        (
            "Is hearthnet fast?",
            "How fast is it?",
            "Is a split model slower?",
            "Why is it slow?",
            "Will it be faster with more machines?",
        ),
        (
            "It is never meant to be slower than your best single machine. Hearthnet measures each "
            "machine and each link, and it splits a model only when that is needed or helps.",
        ),
        ("A slow laptop may get no layers at all. A cable is better than a radio link.",),
    ),
    Topic(
        (
            "What is nnsight?",
            "Does it work with nnsight?",
            "Can researchers use hearthnet?",
            "How do I use nnsight with hearthnet?",
            "Can I look inside the model?",
            "Can I change activations?",
        ),
        (
            "Nnsight is a library for looking inside a model. With hearthnet, an unmodified "
            "nnsight client can read and change the activations of a model that is spread over "
            "several machines.",
        ),
        (
            "Your code runs in a jail: a process of its own without weights, without files and "
            "without network.",
        ),
    ),
    Topic(
        ("What is the jail?", "Where does user code run?", "Is it safe to run the code of others?"),
        (
            "The jail is a process of its own, one for each job. It has no network, no files and "
            "no weights, and its memory and time are limited.",
        ),
    ),
    Topic(
        (
            "Is hearthnet secure?",
            "How are the machines connected?",
            "Is the link encrypted?",
            "How do the machines know each other?",
            "What keeps strangers out?",
        ),
        (
            "Every machine has its own key, and all links are encrypted with TLS. Only machines "
            "that you have invited can join, and you can throw a machine out at any time.",
        ),
    ),
    Topic(
        (
            "How do the machines find each other?",
            "What is discovery?",
            "Does it use mDNS?",
            "How does it find other machines?",
        ),
        (
            "The machines find each other with mDNS on the local network. If that does not work, "
            "you can name an address with --peer HOST:PORT.",
        ),
    ),
    Topic(
        (
            "Which models can I use?",
            "Which models does hearthnet run?",
            "Does it run Llama?",
            "What models are supported?",
            "Can I use Qwen?",
        ),
        (
            "Hearthnet runs models in the Hugging Face format with safetensors weights, for "
            "example Llama, Qwen, Mistral, Gemma, Phi, OLMo and GPT-2.",
        ),
        ("A checkpoint with pickle weights is refused, because it could run any code.",),
    ),
    Topic(
        (
            "Where do the weights come from?",
            "How does a machine get the weights?",
            "Do I have to download the model on every machine?",
        ),
        (
            "From the local cache, from other machines of the hearth, or from the hub, in that "
            "order. A machine fetches only the tensors that it needs.",
        ),
    ),
    Topic(
        ("What is speculation?", "What are speculative tokens?", "How can decoding be faster?"),
        (
            "With speculation the asker guesses several tokens and sends them through the machines "
            "in one step. Wrong guesses are thrown away, so the result stays the same.",
        ),
    ),
    Topic(
        ("What is a token?", "What are tokens?", "What does token mean?"),
        (
            "A token is a small piece of text, often a word or a part of a word. A language model "
            "reads and writes tokens, one after the other.",
        ),
    ),
    Topic(
        ("What is a language model?", "What is a model?", "How does a language model work?"),
        (
            "A language model is a program that has learned which word comes next. It writes a "
            "text word by word.",
        ),
    ),
    Topic(
        ("What is a checkpoint?", "What are weights?", "What is safetensors?"),
        (
            "A checkpoint is a directory with the weights of a model, its settings and its "
            "tokenizer. The weights are stored as safetensors, which cannot hide any code.",
        ),
    ),
    Topic(
        ("What is a mesh?", "What does peer-to-peer mean?", "What is peer-to-peer?"),
        (
            "In a peer-to-peer mesh, all machines are equal and talk to each other directly. There "
            "is no central server.",
        ),
    ),
    Topic(
        ("What is an embedding?", "What are the ends of a model?", "Who keeps the ends?"),
        (
            "The ends are the embedding at the start and the norm and output head at the end. They "
            "stay with the asker, so a hop sees only numbers.",
        ),
    ),
)
