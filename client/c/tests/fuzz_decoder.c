/* Fuzzer of everything that libshmserve decodes. With clang: -fsanitize=fuzzer,address,undefined -DLIBFUZZER.
 * Else a program that changes seeds at random, always in the same way:
 *
 *     fuzz_decoder INPUTS [SEED]
 */
#include "../shmserve.c"

static Decoded decoded;
static Model model;
static uint64_t accepted;

static void use(const void *bytes, size_t count) {
    static volatile uint8_t sink;
    for (size_t i = 0; i < count; i++) sink = (uint8_t)(sink + ((const uint8_t *)bytes)[i]);
}

static void use_specs(const shmserve_spec *specs, size_t count) {
    for (size_t i = 0; i < count; i++) {
        use(specs[i].name, strlen(specs[i].name));
        use(specs[i].shape, specs[i].rank * sizeof *specs[i].shape);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size > MAX_PACKET) return 0;
    if (decode_answer(data, size, &decoded)) {
        accepted++;
        use(decoded.text, strlen(decoded.text));
        for (size_t i = 0; i < decoded.output_count; i++) {
            const shmserve_tensor *output = &decoded.outputs[i];
            use(output->name, strlen(output->name));
            use(output->shape, output->rank * sizeof *output->shape);
            if (output->data) use(output->data, output->nbytes);
            else if (tensor_bytes(output, data, size) != SIZE_MAX) use(data, tensor_bytes(output, data, size));
        }
        for (size_t i = 0; i < decoded.parameter_count; i++) {
            const shmserve_parameter *parameter = &decoded.parameters[i];
            use(parameter->name, strlen(parameter->name));
            if (parameter->kind == SHMSERVE_IS_STRING) use(parameter->value.string, strlen(parameter->value.string));
        }
    }
    Reader r = {data, data + size, false};
    size_t items = take_name(&r, "ModelDescribed");
    if (items != SIZE_MAX && decode_model(&r, items, "name", &model)) {
        accepted++;
        use_specs(model.described.inputs, model.described.input_count);
        use_specs(model.described.outputs, model.described.output_count);
    }
    r = (Reader){data, data + size, false};
    items = take_name(&r, "LaneOpened");
    Opened opened;
    if (items != SIZE_MAX && decode_opened(&r, items, &opened)) accepted++, use(opened.instance, strlen(opened.instance));
    shmserve_bytes element;
    for (size_t offset = 0; shmserve_bytes_next(data, size, &offset, &element);) use(element.data, element.size);
    return 0;
}

#ifndef LIBFUZZER

static uint64_t state;

static uint64_t next(void) { /* xorshift64* */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * UINT64_C(2685821657736338717);
}

static void put_spec(Writer *w, const char *name, const char *datatype, int64_t first) {
    put_array(w, 3), put_text(w, name), put_text(w, datatype);
    put_array(w, 2), put_int(w, first), put_uint(w, 300);
}

/* Write a valid packet. */
static size_t seed(unsigned which, uint8_t *bytes) {
    Writer w = writer(bytes, MAX_PACKET);
    const uint8_t text[] = {2, 0, 0, 0, 'a', 'b', 1, 0, 0, 0, 'c'};
    switch (which) {
    case 0:
        put_array(&w, 10), put_text(&w, "LaneAnswer"), put_uint(&w, 70000);
        put_array(&w, 3);
        put_array(&w, 4), put_text(&w, "OUT"), put_text(&w, "FP32"), put_array(&w, 2), put_uint(&w, 1), put_uint(&w, 2);
        put_bytes(&w, text, 8);
        put_array(&w, 4), put_text(&w, "TEXT"), put_text(&w, "BYTES"), put_array(&w, 1), put_uint(&w, 2);
        put_bytes(&w, text, sizeof text);
        put_array(&w, 4), put_text(&w, "FAR"), put_text(&w, "INT64"), put_array(&w, 1), put_uint(&w, 3), put_tag(&w, 0xc0, 0, 0);
        put_uint(&w, 200), put_text(&w, ""), put_text(&w, "");
        put_tag(&w, 0x84, 0, 0);
        put_text(&w, "b"), put_tag(&w, 0xc3, 0, 0), put_text(&w, "i"), put_int(&w, -5);
        put_text(&w, "d"), put_tag(&w, 0xcb, 0x3ff8000000000000, 8), put_text(&w, "s"), put_text(&w, "text");
        put_array(&w, 7);
        for (unsigned i = 0; i < 7; i++) put_uint(&w, 1000 * i);
        put_tag(&w, 0xc3, 0, 0), put_tag(&w, 0xc2, 0, 0);
        break;
    case 1:
        put_array(&w, 6), put_text(&w, "LaneAnswer"), put_uint(&w, 1), put_array(&w, 0), put_uint(&w, 400);
        put_text(&w, "INVALID_ARGUMENT"), put_text(&w, "a text that is longer than thirty-one bytes");
        break;
    case 2:
        put_array(&w, 6), put_text(&w, "ModelDescribed"), put_text(&w, "12");
        put_array(&w, 2), put_spec(&w, "IN", "FP32", -1), put_spec(&w, "TEXT", "BYTES", 4);
        put_array(&w, 1), put_spec(&w, "OUT", "BF16", -1);
        put_tag(&w, 0xc2, 0, 0), put_array(&w, 2), put_uint(&w, 1), put_text(&w, "more");
        break;
    default:
        put_array(&w, 5), put_text(&w, "LaneOpened"), put_text(&w, "1"), put_text(&w, "echo-1-0");
        put_tag(&w, 0xc3, 0, 0), put_uint(&w, UINT64_C(300000000000));
    }
    return written(&w);
}

static size_t change(uint8_t *bytes, size_t size) {
    static const uint8_t TAGS[] = {0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc3, 0xc4, 0xc6, 0xcb,
                                   0xcf, 0xd3, 0xd9, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xff, 0x7f, 0x00};
    size_t at = size ? next() % size : 0, count = 1 + next() % 8;
    switch (next() % 6) {
    case 0: bytes[at] = (uint8_t)next(); break;
    case 1: bytes[at] = TAGS[next() % sizeof TAGS]; break;
    case 2: bytes[at] ^= (uint8_t)(1u << next() % 8); break;
    case 3: return at; /* cut short */
    case 4: /* remove */
        if (count > size - at) count = size - at;
        memmove(bytes + at, bytes + at + count, size - at - count);
        return size - count;
    default: /* insert */
        if (size + count > 4096) break;
        memmove(bytes + at + count, bytes + at, size - at);
        for (size_t i = 0; i < count; i++) bytes[at + i] = next() % 2 ? TAGS[next() % sizeof TAGS] : (uint8_t)next();
        return size + count;
    }
    return size;
}

int main(int argc, char **argv) {
    uint64_t inputs = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
    state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    if (!state) state = 1;
    static uint8_t packet[MAX_PACKET];
    for (unsigned which = 0; which < 4; which++) {
        uint64_t before = accepted;
        size_t size = seed(which, packet);
        LLVMFuzzerTestOneInput(packet, size);
        if (accepted == before) return fprintf(stderr, "seed %u is not accepted\n", which), 1;
    }
    for (uint64_t i = 0; i < inputs; i++) {
        size_t size = seed((unsigned)(next() % 4), packet);
        for (uint64_t changes = 1 + next() % 4; changes; changes--) size = change(packet, size);
        uint8_t *exact = malloc(size ? size : 1); /* reading behind the packet is found */
        if (!exact) return 1;
        memcpy(exact, packet, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    printf("%llu inputs, %llu of them accepted\n", (unsigned long long)inputs, (unsigned long long)accepted);
    return 0;
}

#endif
