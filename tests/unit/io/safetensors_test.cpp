#include "io/safetensors.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstring>

#include "support/temp_folder.hpp"

namespace oscar::io {
namespace {

using test::TempFolder;

// A file from a header text and data, whatever they are.
std::string raw_file(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  const std::uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header + data;
}

std::string refusal(const TempFolder& folder, const std::string& bytes) {
  const std::string path = folder.file("bad.safetensors");
  test::write_bytes(path, bytes);
  const auto file = SafetensorsFile::open(path);
  if (file) return "accepted";
  EXPECT_EQ(file.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(file.error().message.rfind(path + ": ", 0), 0U) << file.error().message;
  return file.error().message.substr(path.size() + 2);
}

TEST(Safetensors, RoundTripKeepsEveryByte) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  const std::vector<float> floats{1.5F, -2, 3, 4, 5, 6};
  const std::vector<double> doubles{0.1, 0.2};
  const std::vector<std::uint8_t> bytes{7, 8, 9};
  const auto raw = [](const auto& values) { return std::as_bytes(std::span(values)); };
  SafetensorsContent content;
  content.metadata = {{"format", "test"}, {"name", "quote \" and \xc3\xa9"}};
  content.tensors["b.bytes"] = {Dtype::kU8, {3}, {raw(bytes)}};
  content.tensors["c.floats"] = {Dtype::kF32, {2, 3}, {raw(floats).first(8), raw(floats).subspan(8)}};
  content.tensors["d.doubles"] = {Dtype::kF64, {2}, {raw(doubles)}};
  content.tensors["e.empty"] = {Dtype::kF64, {0, 4}, {}};
  ASSERT_TRUE(write_safetensors(content, path));

  const auto file = SafetensorsFile::open(path);
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->metadata(), content.metadata);
  EXPECT_EQ(file->tensors().size(), 4U);
  EXPECT_EQ(file->read<float>("c.floats", {2, 3}).value(), floats);
  EXPECT_EQ(file->read<double>("d.doubles", {2}).value(), doubles);
  EXPECT_EQ(file->read<std::uint8_t>("b.bytes", {3}).value(), bytes);
  EXPECT_TRUE(file->read<double>("e.empty", {0, 4}).value().empty());
  EXPECT_EQ(file->read_bytes("b.bytes").value().size(), 3U);
  EXPECT_EQ(file->content_hash().value(), content_hash(content));
  for (const auto& [name, info] : file->tensors()) {
    EXPECT_EQ(info.num_bytes > 0 ? info.offset % dtype_bytes(info.dtype) : 0, 0U) << name << " is not aligned";
  }
}

// Any tensors under any names, cut into any parts.
RC_GTEST_PROP(Safetensors, AnyContentComesBackAsItWas, ()) {
  const TempFolder folder;
  const auto values = *rc::gen::arbitrary<std::map<std::string, std::vector<double>>>();
  const auto fields = *rc::gen::arbitrary<std::map<std::string, std::string>>();
  SafetensorsContent content;
  for (const auto& [field, value] : fields) content.metadata[valid_utf8(field)] = valid_utf8(value);
  std::map<std::string, std::vector<double>> expected;
  for (const auto& [name, tensor] : values) {
    const auto stored = expected.emplace("t" + valid_utf8(name), tensor).first;  // "__metadata__" is no tensor's name
    const auto bytes = std::as_bytes(std::span(stored->second));
    const std::size_t cut = *rc::gen::inRange<std::size_t>(0, bytes.size() + 1);
    content.tensors[stored->first] = {
        Dtype::kF64, {static_cast<std::int64_t>(stored->second.size())}, {bytes.first(cut), bytes.subspan(cut)}};
  }
  const std::string path = folder.file("a.safetensors");
  RC_ASSERT(write_safetensors(content, path).has_value());
  const auto file = SafetensorsFile::open(path);
  RC_ASSERT(file.has_value());
  RC_ASSERT(file->metadata() == content.metadata);
  RC_ASSERT(file->tensors().size() == expected.size());
  RC_ASSERT(file->content_hash().value() == content_hash(content));
  for (const auto& [name, tensor] : expected) {
    RC_ASSERT(file->read<double>(name, {static_cast<std::int64_t>(tensor.size())}).value() == tensor);
  }
}

TEST(Safetensors, AskingForTheWrongTensorIsAnErrorThatSaysWhatIsThere) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  test::write_bytes(path, raw_file(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", std::string(8, '\0')));
  const auto file = SafetensorsFile::open(path);
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_NE(file->read<float>("u", {2}).error().message.find("'u' is missing"), std::string::npos);
  EXPECT_NE(file->read<float>("t", {3}).error().message.find("is F32 [2], expected F32 [3]"), std::string::npos);
  EXPECT_NE(file->read<double>("t", {2}).error().message.find("is F32 [2], expected F64 [2]"), std::string::npos);
}

TEST(Safetensors, ContentHashSeesEveryFieldButItself) {
  const std::vector<float> values{1, 2};
  const std::vector<float> others{1, 3};
  SafetensorsContent content;
  content.metadata = {{"a", "b"}};
  content.tensors["t"] = {Dtype::kF32, {2}, {std::as_bytes(std::span(values))}};
  const std::string hash = content_hash(content);
  const auto differs = [&](const auto& change) {
    SafetensorsContent changed = content;
    change(changed);
    return content_hash(changed) != hash;
  };
  EXPECT_FALSE(differs([](auto& c) { c.metadata["content_hash"] = "anything"; }));
  EXPECT_TRUE(differs([](auto& c) { c.metadata["a"] = "c"; }));
  EXPECT_TRUE(differs([](auto& c) { c.metadata["b"] = ""; }));
  EXPECT_TRUE(differs([](auto& c) { c.tensors["t"].dtype = Dtype::kI32; }));
  EXPECT_TRUE(differs([](auto& c) { c.tensors["t"].shape = {2, 1}; }));
  EXPECT_TRUE(differs([&](auto& c) { c.tensors["t"].parts = {std::as_bytes(std::span(others))}; }));
  EXPECT_TRUE(differs([](auto& c) {
    c.tensors["u"] = c.tensors["t"];
    c.tensors.erase("t");
  }));
}

TEST(Safetensors, WhatIsNotOneIsRefused) {
  const TempFolder folder;
  const std::string tensor = R"("t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::string data(8, '\0');
  const struct {
    const char* name;
    std::string bytes;
    const char* reason;
  } cases[] = {
      {"empty file", "", "it has only 0 bytes"},
      {"another format", "GGUF____________________", "a header of"},
      {"header longer than the file", raw_file("{}", "").substr(0, 9), "not a safetensors file, or truncated"},
      {"not JSON", raw_file("nonsense", ""), "not JSON"},
      {"cut-off JSON", raw_file("{\"t\":", ""), "not JSON"},
      {"not UTF-8", raw_file("{\"__metadata__\":{\"a\":\"\xff\"}}", ""), "not JSON"},
      {"a list", raw_file("[]", ""), "an array"},
      {"deep nesting", raw_file(std::string(1000000, '['), ""), "an array"},
      {"number as metadata", raw_file(R"({"__metadata__":{"a":1}})", ""), "a number"},
      {"metadata twice", raw_file(R"({"__metadata__":{},"__metadata__":{}})", ""), "occurs twice"},
      {"tensor twice", raw_file("{" + tensor + "," + tensor + "}", data), "occurs twice"},
      {"unknown field", raw_file(R"({"t":{"dtype":"F32","size":1}})", ""), "unknown field 'size'"},
      {"no dtype", raw_file(R"({"t":{"shape":[2],"data_offsets":[0,8]}})", data), "lacks"},
      {"unknown dtype", raw_file(R"({"t":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", data), "'F31'"},
      {"negative size", raw_file(R"({"t":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", data), "negative"},
      {"fraction", raw_file(R"({"t":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", data), "the number '2.0'"},
      {"one offset", raw_file(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[8]}})", data), "not two numbers"},
      {"nine dimensions", raw_file(R"({"t":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]}})", data),
       "more than 8 dimensions"},
      {"size differs from shape", raw_file(R"({"t":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", data),
       "its range is 0 to 8"},
      {"size overflows", raw_file(R"({"t":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", ""),
       "its range is 0 to 0"},
      {"reversed range", raw_file(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", data),
       "range is 8 to 0"},
      {"past the end", raw_file("{" + tensor + "}", data.substr(1)), "truncated"},
      {"bytes left over", raw_file("{" + tensor + "}", data + "x"), "1 bytes follow"},
      {"overlap", raw_file("{" + tensor + R"(,"u":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", data),
       "overlap"},
      {"gap", raw_file("{" + tensor + R"(,"u":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})", data + data),
       "gap"},
  };
  for (const auto& bad : cases) {
    const std::string message = refusal(folder, bad.bytes);
    EXPECT_NE(message.find(bad.reason), std::string::npos) << bad.name << ": " << message;
  }
}

TEST(Safetensors, TextFromAFileReachesMessagesCutAndPrintable) {
  EXPECT_EQ(quote("a\nb"), "'a?b'");
  EXPECT_EQ(quote(std::string(200, 'x')), "'" + std::string(80, 'x') + "...'");
}

TEST(Safetensors, InvalidUtf8IsReplaced) {
  EXPECT_EQ(valid_utf8("caf\xc3\xa9"), "caf\xc3\xa9");
  EXPECT_EQ(valid_utf8("a\xff"), "a\xef\xbf\xbd");
}

}  // namespace
}  // namespace oscar::io
