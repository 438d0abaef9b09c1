#include "rotation/rotation_file.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <oscar/rotation.hpp>

#include "io/safetensors.hpp"
#include "support/statistics.hpp"
#include "support/temp_folder.hpp"

namespace oscar {
namespace {

using test::TempFolder;

RotationSet small_set(Method method = Method::kOurs) {
  return *fit_rotation(test::statistics_of({}), {.method = method}).value();
}

void expect_equal(const SideRotation& got, const SideRotation& expected) {
  EXPECT_EQ(got.transform, expected.transform);
  EXPECT_EQ(got.inverse_transposed, expected.inverse_transposed);
  EXPECT_EQ(got.feedback, expected.feedback);
  EXPECT_EQ(got.metric, expected.metric);
  EXPECT_EQ(got.offset_center, expected.offset_center);
  EXPECT_EQ(got.offset_spread, expected.offset_spread);
  EXPECT_EQ(got.clip_ratio, expected.clip_ratio);
}

void expect_equal(const RotationSet& got, const RotationSet& expected) {
  EXPECT_EQ(got.method, expected.method);
  EXPECT_TRUE(check_rotation(got, expected.geometry));
  EXPECT_EQ(got.geometry.name, expected.geometry.name);
  EXPECT_EQ(got.max_context, expected.max_context);
  EXPECT_EQ(got.num_tokens, expected.num_tokens);
  EXPECT_EQ(got.corpus_hash, expected.corpus_hash);
  EXPECT_EQ(got.producer, expected.producer);
  EXPECT_EQ(got.composition, expected.composition);
  EXPECT_EQ(got.content_hash, expected.content_hash);
  ASSERT_EQ(got.layers.size(), expected.layers.size());
  for (const auto& [index, layer] : expected.layers) {
    const LayerRotation& read = got.layers.at(index);
    EXPECT_EQ(read.rope.order, layer.rope.order);
    EXPECT_EQ(read.rope.rotary_dim, layer.rope.rotary_dim);
    EXPECT_EQ(read.rope.inv_freq, layer.rope.inv_freq);
    ASSERT_EQ(read.heads.size(), layer.heads.size());
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      expect_equal(read.heads[h].key, layer.heads[h].key);
      expect_equal(read.heads[h].value, layer.heads[h].value);
      EXPECT_EQ(read.heads[h].key_mean, layer.heads[h].key_mean);
      EXPECT_EQ(read.heads[h].page_mean, layer.heads[h].page_mean);
      EXPECT_EQ(read.heads[h].key_bits, layer.heads[h].key_bits);
      EXPECT_EQ(read.heads[h].value_bits, layer.heads[h].value_bits);
    }
  }
}

TEST(RotationFile, RoundTripOfEveryMethodIsExact) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  for (const Method method : {Method::kNaive, Method::kHadamard, Method::kPublished, Method::kPublishedPerHead,
                              Method::kOursFast, Method::kOurs}) {
    SCOPED_TRACE(method_name(method));
    const RotationSet set = small_set(method);
    ASSERT_TRUE(save_rotation(set, path));
    const auto read = load_rotation(path);
    ASSERT_TRUE(read) << read.error().message;
    expect_equal(**read, set);
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>{"a.safetensors"});
}

TEST(RotationFile, RoundTripOfSparseLayersAndOddNames) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  RotationSet set = small_set();
  set.layers.erase(0);
  set.geometry.layers[0] = {LayerKind::kNoCache, 0, 0, 0, 0};
  set.geometry.name = "caf\xc3\xa9 \"quoted\"\n";
  set.layers.at(1).rope.order = RopeOrder::kInterleaved;
  set.content_hash = rotation_hash(set);
  ASSERT_TRUE(save_rotation(set, path));
  const auto read = load_rotation(path);
  ASSERT_TRUE(read) << read.error().message;
  expect_equal(**read, set);
}

TEST(RotationFile, ANameThatIsNotUtf8IsReplacedAndStillHashesRight) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  RotationSet set = small_set();
  set.geometry.name = "bad \xff name";
  ASSERT_TRUE(save_rotation(set, path));
  const auto read = load_rotation(path);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ((*read)->geometry.name, "bad \xef\xbf\xbd name");
  EXPECT_EQ((*read)->content_hash, rotation_hash(set));
}

TEST(RotationFile, MetadataSaysWhatItIs) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  ASSERT_TRUE(save_rotation(small_set(Method::kPublished), path));
  const auto file = io::SafetensorsFile::open(path);
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->metadata().at("format"), "oscar-rotation");
  EXPECT_EQ(file->metadata().at("format_version"), "1");
  EXPECT_EQ(file->metadata().at("method"), "published");
  EXPECT_EQ(file->metadata().at("composition"), "r_h_pbr");
  EXPECT_EQ(file->metadata().at("key_clip_ratio"), "0.96");
  EXPECT_EQ(file->metadata().at("value_clip_ratio"), "0.92");
  EXPECT_EQ(file->tensors().at("layers.1.key.transform").shape, (io::Shape{2, 16, 16}));
}

// docs/format-files.md names every field and tensor of both kinds of file; key tensors stand for value tensors.
TEST(RotationFile, TheDocsNameEverythingInAFile) {
  const TempFolder folder;
  const std::string docs = test::read_bytes(OSCAR_DOCS "/format-files.md");
  ASSERT_FALSE(docs.empty());
  const ModelStatistics statistics = test::statistics_of({.num_layers = 1});
  ASSERT_TRUE(save_statistics(statistics, folder.file("statistics")));
  ASSERT_TRUE(save_rotation(small_set(), folder.file("rotation")));
  for (const char* name : {"statistics", "rotation"}) {
    const auto file = io::SafetensorsFile::open(folder.file(name));
    ASSERT_TRUE(file) << file.error().message;
    for (const auto& [field, value] : file->metadata()) {
      EXPECT_NE(docs.find("`" + field + "`"), std::string::npos) << field;
    }
    for (const auto& [tensor, info] : file->tensors()) {
      std::string documented = "layers.N" + tensor.substr(tensor.find('.', 7));
      if (const std::size_t at = documented.find(".value."); at != std::string::npos)
        documented.replace(at, 7, ".key.");
      EXPECT_NE(docs.find("| `" + documented + "` | " + std::string(dtype_name(info.dtype)) + " ["), std::string::npos)
          << documented;
    }
  }
}

TEST(RotationFile, ContentHashSeesEveryField) {
  const RotationSet set = small_set();
  const std::string hash = rotation_hash(set);
  EXPECT_EQ(set.content_hash, hash);
  const std::pair<const char*, std::function<void(RotationSet&)>> changes[] = {
      {"method", [](RotationSet& s) { s.method = Method::kOursFast; }},
      {"name", [](RotationSet& s) { s.geometry.name += "x"; }},
      {"fingerprint", [](RotationSet& s) { s.geometry.fingerprint = "ff"; }},
      {"max_context", [](RotationSet& s) { s.max_context += 1; }},
      {"num_tokens", [](RotationSet& s) { s.num_tokens += 1; }},
      {"corpus_hash", [](RotationSet& s) { s.corpus_hash += "x"; }},
      {"producer", [](RotationSet& s) { s.producer += "x"; }},
      {"composition", [](RotationSet& s) { s.composition += "x"; }},
      {"order", [](RotationSet& s) { s.layers[0].rope.order = RopeOrder::kInterleaved; }},
      {"inv_freq", [](RotationSet& s) { s.layers[0].rope.inv_freq[3] *= 2; }},
      {"transform", [](RotationSet& s) { s.layers[1].heads[1].value.transform[7] += 1; }},
      {"feedback", [](RotationSet& s) { s.layers[1].heads[1].key.feedback[1] += 1; }},
      {"offset", [](RotationSet& s) { s.layers[1].heads[1].key.offset_spread *= 2; }},
      {"clip", [](RotationSet& s) { s.layers[1].heads[0].value.clip_ratio = 0.5F; }},
      {"key_mean", [](RotationSet& s) { s.layers[1].heads[0].key_mean[15] += 1; }},
      {"page_mean", [](RotationSet& s) { s.layers[1].heads[0].page_mean[15] += 1; }},
      {"bits", [](RotationSet& s) { s.layers[1].heads[0].value_bits = 3; }},
  };
  for (const auto& [name, change] : changes) {
    RotationSet changed = set;
    change(changed);
    EXPECT_NE(rotation_hash(changed), hash) << name;
  }
}

TEST(RotationFile, AnUnsoundSetIsNotSavedAndTheOldFileStays) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  test::write_bytes(path, "old");
  const std::pair<const char*, std::function<void(RotationSet&)>> faults[] = {
      {"key.transform has a NaN", [](RotationSet& s) { s.layers[1].heads[0].key.transform[3] = NAN; }},
      {"value.metric has 255 numbers", [](RotationSet& s) { s.layers[1].heads[0].value.metric.pop_back(); }},
      {"not strictly upper", [](RotationSet& s) { s.layers[1].heads[0].key.feedback[16] = 1; }},
      {"not positive", [](RotationSet& s) { s.layers[1].heads[0].key.metric[17] = 0; }},
      {"offset_spread", [](RotationSet& s) { s.layers[1].heads[0].key.offset_spread = 0; }},
      {"offset_center", [](RotationSet& s) { s.layers[1].heads[0].key.offset_center = INFINITY; }},
      {"clip_ratio", [](RotationSet& s) { s.layers[1].heads[0].key.clip_ratio = 1.5F; }},
      {"key_mean", [](RotationSet& s) { s.layers[1].heads[0].key_mean[0] = NAN; }},
      {"expected 0 or 16", [](RotationSet& s) { s.layers[1].heads[0].page_mean.clear(); }},
      {"bits are 4 and 2", [](RotationSet& s) { s.layers[1].heads[0].key_bits = 4; }},
      {"1 KV heads", [](RotationSet& s) { s.layers[1].heads.pop_back(); }},
      {"no such layer", [](RotationSet& s) { s.layers[7] = s.layers[1]; }},
      {"inverse frequencies", [](RotationSet& s) { s.layers[1].rope.inv_freq.pop_back(); }},
      {"max_context", [](RotationSet& s) { s.max_context = -1; }},
  };
  for (const auto& [reason, change] : faults) {
    RotationSet set = small_set();
    change(set);
    const Status status = save_rotation(set, path);
    ASSERT_FALSE(status) << reason;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find(reason), std::string::npos) << status.error().message;
  }
  EXPECT_EQ(test::read_bytes(path), "old");
  EXPECT_EQ(folder.names(), std::vector<std::string>{"a.safetensors"});
}

// Files that are whole and correctly hashed, and wrong all the same.
class ForgedFile : public testing::Test {
 protected:
  Error refusal(const std::function<void(io::SafetensorsContent&)>& change) {
    io::SafetensorsContent content = rotation_content(set_);
    change(content);
    content.metadata["content_hash"] = io::content_hash(content);
    const std::string path = folder_.file("forged.safetensors");
    if (const Status status = io::write_safetensors(content, path); !status) return status.error();
    const auto read = load_rotation(path);
    if (read) return {ErrorCode::kInternal, "accepted"};
    EXPECT_EQ(read.error().message.rfind(path + ": ", 0), 0U) << read.error().message;
    return read.error();
  }
  void expect_refused(const char* reason, const std::function<void(io::SafetensorsContent&)>& change,
                      ErrorCode code = ErrorCode::kBadInput) {
    const Error error = refusal(change);
    EXPECT_EQ(error.code, code) << error.message;
    EXPECT_NE(error.message.find(reason), std::string::npos) << error.message;
  }
  static std::span<const std::byte> raw(const std::vector<float>& values) { return std::as_bytes(std::span(values)); }

  TempFolder folder_;
  RotationSet set_ = small_set();
};

TEST_F(ForgedFile, OtherFormatsAndNewerVersionsAreRefused) {
  expect_refused("not a rotation file: its format is 'oscar-statistics'",
                 [](auto& c) { c.metadata["format"] = "oscar-statistics"; });
  expect_refused("not a rotation file: its format is not given", [](auto& c) { c.metadata.erase("format"); });
  expect_refused(
      "use an oscar that knows version 2", [](auto& c) { c.metadata["format_version"] = "2"; },
      ErrorCode::kUnsupported);
  expect_refused("'format_version' is '0'", [](auto& c) { c.metadata["format_version"] = "0"; });
  expect_refused("'format_version' is 'one'", [](auto& c) { c.metadata["format_version"] = "one"; });
  expect_refused(
      "method 'magic' is unknown", [](auto& c) { c.metadata["method"] = "magic"; }, ErrorCode::kUnsupported);
}

TEST_F(ForgedFile, MissingAndStrangeMetadataIsRefused) {
  for (const char* field :
       {"method", "geometry", "layers", "max_context", "num_tokens", "corpus_hash", "producer", "composition"}) {
    expect_refused(field, [&](auto& c) { c.metadata.erase(field); });
  }
  expect_refused("'max_context' is '-5'", [](auto& c) { c.metadata["max_context"] = "-5"; });
  expect_refused("'num_tokens' is '12x'", [](auto& c) { c.metadata["num_tokens"] = "12x"; });
  expect_refused("geometry is not a JSON object", [](auto& c) { c.metadata["geometry"] = "[]"; });
  expect_refused("list of layers names '9'",
                 [](auto& c) { c.metadata["layers"] = R"({"9":{"rope_order":"none","rotary_dim":0}})"; });
}

TEST_F(ForgedFile, MissingSurplusAndMisshapenTensorsAreRefused) {
  expect_refused("'layers.0.key.metric' is missing", [](auto& c) { c.tensors.erase("layers.0.key.metric"); });
  expect_refused("'layers.0.surplus' has no place",
                 [](auto& c) { c.tensors["layers.0.surplus"] = c.tensors["layers.0.key.metric"]; });
  expect_refused("is F32 [2, 256], expected F32 [2, 16, 16]", [](auto& c) {
    c.tensors["layers.0.key.metric"].shape = {2, 256};
  });
  expect_refused("expected F32 [2, 16, 16]", [](auto& c) { c.tensors["layers.0.key.metric"].dtype = io::Dtype::kI32; });
  expect_refused("key_mean and page_mean", [](auto& c) { c.tensors.erase("layers.0.page_mean"); });
  // The tables of one method in a file of another.
  expect_refused("has no place", [](auto& c) { c.metadata["method"] = "ours-fast"; });
}

TEST_F(ForgedFile, NonFiniteAndImpossibleValuesAreRefusedByTensor) {
  std::vector<float> values(2 * 16 * 16, 0.5F);
  values[300] = std::numeric_limits<float>::quiet_NaN();
  expect_refused("'layers.1.value.transform' has a NaN or an infinity at [1, 2, 12]",
                 [&](auto& c) { c.tensors["layers.1.value.transform"].parts = {raw(values)}; });
  values[300] = 0.5F;
  expect_refused("layer 1: KV head 0: key.feedback is not strictly upper",
                 [&](auto& c) { c.tensors["layers.1.key.feedback"].parts = {raw(values)}; });
  const std::vector<float> pair{1, -1};
  expect_refused("layer 0: KV head 1: key.offset_spread is not positive",
                 [&](auto& c) { c.tensors["layers.0.key.offset_spread"].parts = {raw(pair)}; });
}

TEST(RotationFile, DamagedTruncatedAndOtherFilesAreRefused) {
  const TempFolder folder;
  const std::string path = folder.file("a.safetensors");
  const auto refusal = [&](const std::string& bytes) {
    test::write_bytes(path, bytes);
    const auto read = load_rotation(path);
    if (read) return std::string("accepted");
    EXPECT_EQ(read.error().code, ErrorCode::kBadInput);
    return read.error().message;
  };
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  ASSERT_TRUE(save_rotation(small_set(), path));
  const std::string good = test::read_bytes(path);

  std::string damaged = good;
  damaged[good.size() - 100] ^= 0x10;
  EXPECT_TRUE(contains(refusal(damaged), "the rotation file is damaged"));
  EXPECT_TRUE(contains(refusal(good.substr(0, good.size() - 1)), "truncated"));
  EXPECT_TRUE(contains(refusal(good.substr(0, 100)), "truncated"));
  EXPECT_TRUE(contains(refusal(""), "not a safetensors file"));
  EXPECT_TRUE(contains(refusal("GGUF" + std::string(100, '\3')), "not a safetensors file"));

  const auto missing = load_rotation(folder.file("missing"));
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kIo);
  EXPECT_TRUE(contains(missing.error().message, "No such file or directory"));
}

}  // namespace
}  // namespace oscar
